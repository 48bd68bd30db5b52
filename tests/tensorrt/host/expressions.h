/* Dimensions as a builder passes them to plugins: expressions with unknown values. */
#ifndef EDGE_HOST_EXPRESSIONS_H
#define EDGE_HOST_EXPRESSIONS_H

#include <NvInferRuntime.h>

#include <deque>

namespace edge_host {

/* A dimension known only when a network is run. This host keeps its value. */
class Expression final : public nvinfer1::IDimensionExpr, private nvinfer1::apiv::VDimensionExpr {
public:
    Expression(int64_t value, bool constant) : value_{value}, constant_{constant} { mImpl = this; }
    ~Expression() noexcept override = default;

    int64_t value() const { return value_; }

private:
    bool isConstant() const override { return constant_; }
    int64_t getConstantValue() const override { return constant_ ? value_ : INT64_MIN; }
    bool isSizeTensor() const override { return false; }

    int64_t value_;
    bool constant_;
};

/* Makes expressions from expressions, and owns them. */
class Builder final : public nvinfer1::IExprBuilder, private nvinfer1::apiv::VExprBuilder {
public:
    Builder() { mImpl = this; }
    ~Builder() noexcept override = default;

    Expression const *open(int64_t value) { return &kept_.emplace_back(value, false); }

private:
    using Dimension = nvinfer1::IDimensionExpr;

    Dimension const *constant(int64_t value) override { return &kept_.emplace_back(value, true); }
    Dimension const *operation(nvinfer1::DimensionOperation op, Dimension const &first,
                               Dimension const &second) override;
    /* No output's size depends on the data. */
    Dimension const *declareSizeTensor(int32_t, Dimension const &, Dimension const &) override {
        return nullptr;
    }

    std::deque<Expression> kept_;
};

inline int64_t value_of(nvinfer1::IDimensionExpr const *dimension) {
    return static_cast<Expression const *>(dimension)->value();
}

}  // namespace edge_host

#endif
