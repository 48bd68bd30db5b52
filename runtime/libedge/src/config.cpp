#include "config.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "schema.h"

namespace edge_lib {

int64_t times(int64_t a, int64_t b) {
  int64_t out;
  return __builtin_mul_overflow(a, b, &out) || out > HUGE_SIZE ? HUGE_SIZE : out;
}
int64_t plus(int64_t a, int64_t b) { return std::min(HUGE_SIZE, a + b); }
int64_t up_to(int64_t value, int64_t multiple) {
  return times(plus(value, multiple - 1) / multiple, multiple);
}

DType dtype_of(const std::string& name) {
  static const char* const names[] = {"f32", "f16", "i8", "u8", "i32", "i64"};
  return DType(std::find(names, names + 6, name) - names);
}
int64_t item_size(DType type) {
  static const int64_t sizes[] = {4, 2, 1, 1, 4, 8};
  return sizes[int(type)];
}

bool finite(const char* data, int64_t bytes, DType type) {
  auto sound = [&](auto exponent) {
    bool wrong = false;
    for (int64_t at = 0; at < bytes; at += int64_t(sizeof exponent)) {
      auto bits = exponent;
      std::memcpy(&bits, data + at, sizeof bits);
      wrong |= (bits & exponent) == exponent;
    }
    return !wrong;
  };
  if (type == DType::f32) return sound(uint32_t(0x7f800000));
  return type != DType::f16 || sound(uint16_t(0x7c00));
}

int64_t Shape::elements() const {
  int64_t out = 1;
  for (int64_t dim : dims) out = times(out, dim);
  return out;
}

namespace {

constexpr int64_t HEAD_MULTIPLE = 8, MOST_ROTATED = 1 << 16;

// A layer's fields, with their defaults.
struct Layer {
  const Json& json;
  const char* kind;  // name of its definition in the schema
  const Json& get(const char* key) const {
    const Json* given = json.find(key);
    return given ? *given : *Schema::manifest().fallback(kind, key);
  }
  int64_t operator[](const char* key) const { return get(key).whole(); }
};

class Reader {
 public:
  Reader(Config& config, Faults& faults) : config_(config), faults_(faults) {}

  // Other kinds have no state. A plan that names a state of theirs is refused.
  void read(const Json& json, size_t index) {
    at_ = "layers." + std::to_string(index);
    const std::string& kind = json["kind"].string();
    if (kind == "mamba1") mamba1({json, "Mamba1Config"});
    if (kind == "mamba2") mamba2({json, "Mamba2Config"});
    if (kind == "gated_deltanet") gated_deltanet({json, "GatedDeltaNetConfig"});
    if (kind == "shortconv") shortconv({json, "ShortConvConfig"});
    if (kind == "attention") attention({json, "AttentionConfig"});
  }

 private:
  void wrong(const char* field, const std::string& message) {
    faults_.add("model." + at_ + (*field ? "." : "") + field, message);
  }
  void convolution(int64_t width, int64_t channels) {
    config_.recurrent.push_back({at_ + ".conv_state", {width - 1, 1, channels}});
    log("conv_in", channels);
    config_.conv_widths.push_back(width);
  }
  void log(const char* name, int64_t width) { config_.logs.push_back({at_ + "." + name, {width}}); }

  void mamba1(const Layer& layer) {
    int64_t inner = layer["d_inner"], states = layer["d_state"], groups = layer["C_groups"];
    if (groups % layer["B_groups"] || inner % groups)
      wrong("", "B_groups must divide C_groups, and C_groups must divide d_inner");
    convolution(layer["d_conv"], inner);
    config_.recurrent.push_back({at_ + ".ssm_state", {1, states, inner}});
    log("scan_x", inner);
    log("scan_dt", inner);
    log("scan_B", times(layer["B_groups"], states));
  }

  void mamba2(const Layer& layer) {
    int64_t d_ssm = layer["d_ssm"], dim = layer["head_dim"], groups = layer["n_groups"];
    int64_t heads = d_ssm / dim, group_states = times(groups, layer["d_state"]);
    if (d_ssm % dim)
      wrong("", "d_ssm " + std::to_string(d_ssm) + " is not a multiple of head_dim " +
                    std::to_string(dim));
    else if (heads % groups)
      wrong("", std::to_string(heads) + " heads do not divide into " + std::to_string(groups) +
                    " groups");
    if (d_ssm > layer["d_inner"]) wrong("", "d_ssm exceeds d_inner");
    convolution(layer["d_conv"], plus(d_ssm, times(2, group_states)));
    config_.recurrent.push_back({at_ + ".ssm_state", {1, heads, dim, layer["d_state"]}});
    log("scan_x", d_ssm);
    log("scan_dt", heads);
    log("scan_B", group_states);
  }

  void gated_deltanet(const Layer& layer) {
    int64_t heads = layer["n_heads"], dim = layer["head_dim"], groups = layer["n_groups"];
    int64_t shared = times(groups, layer["d_state"]), inner = times(heads, dim);
    if (heads % groups)
      wrong("", std::to_string(heads) + " heads do not divide into " + std::to_string(groups) +
                    " groups");
    convolution(layer["d_conv"], plus(inner, times(2, shared)));
    config_.recurrent.push_back({at_ + ".ssm_state", {1, heads, dim, layer["d_state"]}});
    log("scan_x", inner);
    log("scan_dt", times(2, heads));
    log("scan_B", shared);
  }

  void shortconv(const Layer& layer) { convolution(layer["d_conv"], layer["d_model"]); }

  void attention(const Layer& layer) {
    int64_t heads = layer["n_heads"], kv = layer["n_kv_heads"], dim = layer["head_dim"];
    const Json &rope = layer.get("rope"), &width = layer.get("d_conv"),
               &window = layer.get("window");
    if (heads % kv)
      wrong("", std::to_string(heads) + " heads do not divide into " + std::to_string(kv) +
                    " KV heads");
    if (!rope.is(Json::null)) {
      config_.ropes.push_back(rotation(rope));
      if (config_.ropes.back().dim > dim) wrong("rope.dim", "exceeds head_dim");
    }
    if (!width.is(Json::null)) {
      if (dim % HEAD_MULTIPLE)
        wrong("head_dim", "is not a multiple of 8, so it cannot be convolved");
      convolution(width.whole(), times(plus(heads, times(2, kv)), dim));
    }
    for (const char* name : {".key_cache", ".value_cache"}) {
      config_.caches.push_back({at_ + name, {1, kv, 0, up_to(dim, HEAD_MULTIPLE)}});
      config_.windows.push_back(window.is(Json::null) ? 0 : window.whole());
    }
  }

  Rope rotation(const Json& json) {
    Layer fields{json, "RopeConfig"};
    const Json &theta = fields.get("theta"), &scaling = fields.get("scaling");
    if (fields["dim"] % 2) wrong("rope.dim", "is odd");
    if (fields["dim"] > MOST_ROTATED) wrong("rope.dim", "is larger than any model needs");
    return {theta.number(), fields["dim"],
            !scaling.is(Json::null)};
  }

  Config& config_;
  Faults& faults_;
  std::string at_;
};

}  // namespace

std::vector<float> powers(double theta, int64_t dim) {
  std::vector<float> out(size_t(dim) / 2);
  for (size_t i = 0; i < out.size(); i++)
    out[i] = float(std::pow(double(float(theta)), double(-float(2 * i) / float(dim))));
  return out;
}

int64_t Config::looks_back() const {
  int64_t out = 1;
  for (int64_t window : windows) out = std::max(out, window);
  return out;
}

Config Config::of(const Json& model, Faults& faults) {
  Config out;
  out.family = model["family"].string();
  out.vocab = model["vocab_size"].whole();
  out.d_model = model["d_model"].whole();
  const Json* context = model.find("max_context");
  out.max_context = context && context->is(Json::integer) ? context->whole() : 0;
  Reader reader(out, faults);
  const auto& layers = model["layers"].items();
  out.layers = layers.size();
  for (size_t i = 0; i < layers.size(); i++) reader.read(layers[i], i);
  std::sort(out.conv_widths.begin(), out.conv_widths.end());
  return out;
}

}  // namespace edge_lib
