// Attention's entry: tensors become pointers; single queries and chunks go to their kernels.
#include "attention.h"

#include <ATen/ops/empty.h>

#include "ops.h"

namespace twostroke {
namespace {

template <typename E>
Paged<E> paged(const Tensor& view) {
  return {view.const_data_ptr<E>(), view.stride(0), view.stride(1), view.stride(2), view.stride(3)};
}

}  // namespace

Tensor attention(
    const Tensor& q, const Tensor& kv, const std::optional<Tensor>& scales, const Tensor& query_starts, const Tensor& context_lens,
    const Tensor& block_tables, int64_t num_single, double scale, int64_t window, double softcap) {
  check_pool(kv, scales, q);
  TORCH_CHECK(block_tables.stride(1) == 1 && q.size(1) % kv.size(2) == 0, "query heads must be a multiple of KV heads");
  Tensor out = at::empty({q.size(0), q.size(1) * q.size(2)}, q.options());
  dispatch(q, kv, [&](auto zero, auto stored_zero) {
    using T = decltype(zero);
    using P = decltype(stored_zero);
    const Attention<T, P> call{
        .q = q.const_data_ptr<T>(),
        .q_token_stride = q.stride(0),
        .q_head_stride = q.stride(1),
        .kv = paged<P>(kv),
        .scales = scales ? paged<float>(*scales) : Paged<float>{},
        .out = out.mutable_data_ptr<T>(),
        .query_starts = query_starts.const_data_ptr<int32_t>(),
        .context_lens = context_lens.const_data_ptr<int32_t>(),
        .block_tables = block_tables.const_data_ptr<int32_t>(),
        .table_stride = block_tables.stride(0),
        .num_sequences = context_lens.size(0),
        .num_single = num_single,
        .num_heads = q.size(1),
        .num_kv_heads = kv.size(2),
        .head_dim = q.size(2),
        .block_size = kv.size(3),
        .window = window,
        .scale = float(scale),
        .softcap = float(softcap),
    };
    if (num_single > 0) attend_singles(call);
    if (num_single < call.num_sequences) attend_chunks(call);
  });
  return out;
}

}  // namespace twostroke
