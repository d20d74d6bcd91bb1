// All kernels, as bindings.cpp gives them to Python; shapes and meanings as in shared/kernels/interface.py. Checks here are those
// that keep memory safe; everything else is the caller's contract.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace twostroke {

using at::Tensor;

// Below this many elements sharing an elementwise pass costs more than it saves.
constexpr int64_t kElementsPerThread = 32768;
// Fewer weights are read sooner than another thread wakes up.
constexpr int64_t kWeightsPerThread = 65536;

Tensor attention(
    const Tensor& q, const Tensor& kv, const std::optional<Tensor>& scales, const Tensor& query_starts, const Tensor& context_lens,
    const Tensor& block_tables, int64_t num_single, double scale, int64_t window, double softcap);
void rope_store(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos_sin, const Tensor& kv, const std::optional<Tensor>& scales,
    const Tensor& positions, const Tensor& slots);
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);
Tensor add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps);
Tensor silu_mul(const Tensor& gate_up);
Tensor linear(const Tensor& x, const Tensor& panels, int64_t num_outputs, const std::optional<Tensor>& bias);
Tensor linear_few_bf16(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias);
Tensor linear_pairs(const Tensor& x, const Tensor& panels, int64_t num_outputs, const std::optional<Tensor>& bias);
Tensor pack_pairs(const Tensor& weight);
Tensor pair_rows(const Tensor& panels, int64_t size, const Tensor& indices);
Tensor pack_panels(const Tensor& weight);
Tensor panel_rows(const Tensor& panels, const Tensor& indices);
void copy_blocks(const Tensor& pool, const Tensor& sources, const Tensor& targets);
Tensor gather_blocks(const Tensor& pool, const Tensor& block_ids);
void scatter_blocks(const Tensor& pool, const Tensor& block_ids, const Tensor& blocks);
Tensor sample(
    const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
    const Tensor& uniforms);
Tensor argmax(const Tensor& logits);

// Calls body(T(0)) with the element type of x.
template <typename Body>
void dispatch(const Tensor& x, const Body& body) {
  if (x.scalar_type() == at::kFloat) {
    body(float(0));
  } else {
    TORCH_CHECK(x.scalar_type() == at::kBFloat16, "CPU kernels compute in float32 or bfloat16, not ", x.scalar_type());
    body(c10::BFloat16(0));
  }
}

// As above, with P(0) of the pool's element type besides: T, int8 or float8_e4m3fn.
template <typename Body>
void dispatch(const Tensor& x, const Tensor& kv, const Body& body) {
  dispatch(x, [&](auto zero) {
    if (kv.scalar_type() == at::kChar) {
      body(zero, int8_t(0));
    } else if (kv.scalar_type() == at::kFloat8_e4m3fn) {
      body(zero, c10::Float8_e4m3fn(0));
    } else {
      TORCH_CHECK(kv.scalar_type() == x.scalar_type(), "a KV pool of ", kv.scalar_type(), " for heads of ", x.scalar_type());
      body(zero, zero);
    }
  });
}

// x [T, heads, D] with contiguous heads, and a layer of the pool for such heads: kv [NB, 2, Hkv, BS, D] and, with one-byte types,
// scales [NB, 2, Hkv, BS].
inline void check_pool(const Tensor& kv, const std::optional<Tensor>& scales, const Tensor& x) {
  TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1, "heads must be contiguous");
  const int64_t dim = x.size(2);
  TORCH_CHECK(
      kv.dim() == 5 && kv.size(1) == 2 && kv.size(4) == dim && kv.stride(4) == 1 && kv.stride(3) == dim,
      "the heads of a KV block must be contiguous [BS, D] with D = ", dim);
  TORCH_CHECK(scales.has_value() == (kv.element_size() == 1), "a pool of a one-byte type has scales, and no other has");
  TORCH_CHECK(
      !scales || (scales->sizes() == kv.sizes().slice(0, 4) && scales->stride(3) == 1 && scales->scalar_type() == at::kFloat),
      "scales must be float32, one for each token of the pool");
}

}  // namespace twostroke
