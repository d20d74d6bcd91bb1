// Rows in groups of nearly equal size: a group of one or two would waste most of a pass over what all groups are multiplied with.
#pragma once

#include <cstdint>

namespace twostroke {

struct Groups {
  int64_t num_rows, count;

  Groups(int64_t rows, int64_t most) : num_rows(rows), count((rows + most - 1) / most) {}
  int64_t start(int64_t group) const { return group * num_rows / count; }
  int64_t size(int64_t group) const { return start(group + 1) - start(group); }
};

}  // namespace twostroke
