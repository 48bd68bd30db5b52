#include "expressions.h"

#include <algorithm>
#include <cstdlib>

namespace edge_host {

namespace {

int64_t computed(nvinfer1::DimensionOperation op, int64_t a, int64_t b) {
    using Operation = nvinfer1::DimensionOperation;
    switch (op) {
    case Operation::kSUM: return a + b;
    case Operation::kPROD: return a * b;
    case Operation::kMAX: return std::max(a, b);
    case Operation::kMIN: return std::min(a, b);
    case Operation::kSUB: return a - b;
    case Operation::kEQUAL: return a == b;
    case Operation::kLESS: return a < b;
    case Operation::kFLOOR_DIV: return a / b;
    case Operation::kCEIL_DIV: return (a + b - 1) / b;
    }
    std::abort();
}

}  // namespace

nvinfer1::IDimensionExpr const *Builder::operation(nvinfer1::DimensionOperation op,
                                                   Dimension const &first,
                                                   Dimension const &second) {
    int64_t const value = computed(op, value_of(&first), value_of(&second));
    return &kept_.emplace_back(value, first.isConstant() && second.isConstant());
}

}  // namespace edge_host
