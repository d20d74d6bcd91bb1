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
    const Tensor& q, const Tensor& kv_layer, const Tensor& query_starts, const Tensor& context_lens, const Tensor& block_tables,
    int64_t num_single, double scale, int64_t window, double softcap);
void rope_store(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos_sin, const Tensor& kv_layer, const Tensor& positions,
    const Tensor& slots);
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);
Tensor add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps);
Tensor silu_mul(const Tensor& gate_up);
Tensor linear(const Tensor& x, const Tensor& panels, int64_t num_outputs, const std::optional<Tensor>& bias);
Tensor linear_few_bf16(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias);
Tensor pack_panels(const Tensor& weight);
Tensor panel_rows(const Tensor& panels, const Tensor& indices);
void copy_blocks(const Tensor& kv, const Tensor& sources, const Tensor& targets);
Tensor gather_blocks(const Tensor& kv, const Tensor& block_ids);
void scatter_blocks(const Tensor& kv, const Tensor& block_ids, const Tensor& blocks);
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

// x [T, heads, D] with contiguous heads, and a pool of the same type whose blocks' heads are [BS, D] without gaps.
inline void check_heads(const Tensor& x, const Tensor& kv_layer) {
  TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1, "heads must be contiguous");
  TORCH_CHECK(kv_layer.dim() == 5 && kv_layer.scalar_type() == x.scalar_type(), "the KV pool must have the type of the heads");
  const int64_t dim = x.size(2), block_size = kv_layer.size(3);
  TORCH_CHECK(
      kv_layer.size(4) == dim && kv_layer.stride(4) == 1 && kv_layer.stride(3) == dim && kv_layer.stride(2) == block_size * dim,
      "the heads of a KV block must be contiguous [BS, D] with D = ", dim);
}

}  // namespace twostroke
