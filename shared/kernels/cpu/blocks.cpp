// Whole blocks of the pool, moved as bytes: a block is one contiguous run, whatever its element type.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <vector>

#include "ops.h"

namespace twostroke {
namespace {

constexpr int64_t kBytesPerThread = 1 << 18;

int64_t block_bytes(const Tensor& blocks) {
  TORCH_CHECK(blocks.is_contiguous(), "blocks must be contiguous");
  return blocks.numel() / std::max<int64_t>(1, blocks.size(0)) * blocks.element_size();
}

void check_ids(const Tensor& pool, const Tensor& ids) {
  const int64_t* id = ids.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.numel(); ++i)
    TORCH_CHECK(0 <= id[i] && id[i] < pool.size(0), "block id ", id[i], " is not in the pool of ", pool.size(0));
}

// address(i) gives where block i comes from and goes to.
template <typename Address>
void move_blocks(int64_t num_blocks, int64_t size_bytes, const Address& address) {
  const int64_t grain = std::max<int64_t>(1, kBytesPerThread / size_bytes);
  at::parallel_for(0, num_blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto [from, to] = address(i);
      std::memcpy(to, from, size_bytes);
    }
  });
}

struct Move {
  const char* from;
  char* to;
};

}  // namespace

void copy_blocks(const Tensor& pool, const Tensor& sources, const Tensor& targets) {
  TORCH_CHECK(sources.numel() == targets.numel(), "as many targets as sources");
  check_ids(pool, sources);
  check_ids(pool, targets);
  const int64_t size = block_bytes(pool);
  char* base = static_cast<char*>(pool.mutable_data_ptr());
  const int64_t *source = sources.const_data_ptr<int64_t>(), *target = targets.const_data_ptr<int64_t>();
  move_blocks(sources.numel(), size, [&](int64_t i) { return Move{base + source[i] * size, base + target[i] * size}; });
}

Tensor gather_blocks(const Tensor& pool, const Tensor& block_ids) {
  check_ids(pool, block_ids);
  std::vector<int64_t> shape = pool.sizes().vec();
  shape[0] = block_ids.numel();
  Tensor out = at::empty(shape, pool.options());
  const int64_t size = block_bytes(pool), *id = block_ids.const_data_ptr<int64_t>();
  const char* base = static_cast<const char*>(pool.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  move_blocks(block_ids.numel(), size, [&](int64_t i) { return Move{base + id[i] * size, to + i * size}; });
  return out;
}

void scatter_blocks(const Tensor& pool, const Tensor& block_ids, const Tensor& blocks) {
  check_ids(pool, block_ids);
  const int64_t size = block_bytes(pool), *id = block_ids.const_data_ptr<int64_t>();
  TORCH_CHECK(
      blocks.scalar_type() == pool.scalar_type() && blocks.size(0) == block_ids.numel() &&
          (block_ids.numel() == 0 || block_bytes(blocks) == size),
      "blocks must be of the pool's shape and type, one per id");
  char* base = static_cast<char*>(pool.mutable_data_ptr());
  const char* from = static_cast<const char*>(blocks.const_data_ptr());
  move_blocks(block_ids.numel(), size, [&](int64_t i) { return Move{from + i * size, base + id[i] * size}; });
}

}  // namespace twostroke
