/* Dimensions as a builder gives them to plugins: expressions whose values it does not tell. */
#ifndef EDGE_HOST_EXPRESSIONS_H
#define EDGE_HOST_EXPRESSIONS_H

#include <NvInferRuntime.h>

#include <deque>

namespace edge_host {

/* A dimension that is only known when a network is run, of which this host knows the value. */
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

/* Makes expressions of expressions; they live as long as it does. */
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
    /* No output's size depends on what is computed. */
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
