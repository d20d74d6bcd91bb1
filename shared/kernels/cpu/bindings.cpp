// The Python module, straight through pybind11: a small rms_norm costs half a microsecond more than allocating its result does.
#include <torch/csrc/utils/pybind.h>

#include "ops.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace twostroke;
  // Other Python threads (the server's) run while a kernel does.
  using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  m.def("attention", &attention, Unlocked());
  m.def("rope_store", &rope_store, Unlocked());
  m.def("rms_norm", &rms_norm, Unlocked());
  m.def("add_rms_norm", &add_rms_norm, Unlocked());
  m.def("silu_mul", &silu_mul, Unlocked());
  m.def("linear", &linear, Unlocked());
  m.def("linear_few_bf16", &linear_few_bf16, Unlocked());
  m.def("linear_pairs", &linear_pairs, Unlocked());
  m.def("pack_pairs", &pack_pairs, Unlocked());
  m.def("pair_rows", &pair_rows, Unlocked());
  m.def("pack_panels", &pack_panels, Unlocked());
  m.def("panel_rows", &panel_rows, Unlocked());
  m.def("copy_blocks", &copy_blocks, Unlocked());
  m.def("gather_blocks", &gather_blocks, Unlocked());
  m.def("scatter_blocks", &scatter_blocks, Unlocked());
  m.def("sample", &sample, Unlocked());
  m.def("argmax", &argmax, Unlocked());
}
