// The inputs that the host writes before a run, as in runtime/cuda/inputs.py.
#pragma once

#include "ledger.h"
#include "plan.h"

namespace edge_lib {

struct RunInputs {
  const Step& step;
  const int32_t* tokens;  // null in a rehearsal, which runs zeros
  bool all_rows;
};

// Writes one input of a program before each run. Its name is resolved once.
class InputWriter {
 public:
  InputWriter(const Plan& plan, const std::string& name, char* target);
  void write(const RunInputs& run) const;

 private:
  enum What {
    fields,
    sliding,
    tokens,
    rows,
    replay,
    slots,
    positions,
    ancestors,
    taps,
    state_taps,
    cosines,
    sines
  };
  void write_taps(const RunInputs& run) const;
  void write_angles(const RunInputs& run) const;

  What what_;
  int width_ = 0;  // of the convolution, for taps
  const std::vector<float>* inverses_ = nullptr;
  int32_t* whole_;
  float* real_;
};

// Position of a new token in its sequence.
int64_t place_of(const Step& step, int token);

}  // namespace edge_lib
