#include "config.h"

#include <algorithm>
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
    if (kind == "experts") experts({json, "ExpertsConfig"});
    fit(json, index);
  }
  // Call it after the last layer.
  void end() {
    if (aside_) faults_.add("model.layers", "end with one aside, which nothing reads");
  }

 private:
  void wrong(const char* field, const std::string& message) {
    faults_.add("model." + at_ + (*field ? "." : "") + field, message);
  }
  // Which stream a layer reads and writes must make sense after the layer before it.
  void fit(const Json& json, size_t index) {
    auto has = [&](const char* field) {
      const Json* found = json.find(field);
      return found && found->truth();
    };
    bool parallel = has("parallel"), recalls = has("recalls"), aside = has("aside") || recalls;
    if (parallel && (!index || parallel_ || aside_ || aside))
      wrong("", "is parallel to no layer before it");
    if (aside && recalls == aside_) wrong("", "cannot be aside after the layer before it");
    parallel_ = parallel, aside_ = aside;
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
    if (groups > 1 && !layer.get("inner_eps").is(Json::null))
      wrong("inner_eps", "is given, but B and C of several groups cannot have norms");
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
    bool gate = layer.get("output_gate").truth(), head_gate = layer.get("head_gate").truth();
    if (gate && head_gate) wrong("", "output_gate and head_gate exclude each other");
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
      if (gate || head_gate) wrong("d_conv", "is given, and excludes a gate");
      convolution(width.whole(), times(plus(heads, times(2, kv)), dim));
    }
    for (const char* name : {".key_cache", ".value_cache"}) {
      config_.caches.push_back({at_ + name, {1, kv, 0, up_to(dim, HEAD_MULTIPLE)}});
      config_.windows.push_back(window.is(Json::null) ? 0 : window.whole());
    }
  }

  void experts(const Layer& layer) {
    Layer router{layer.get("router"), "RouterConfig"};
    int64_t count = layer["n_experts"], chosen = router["top_k"], groups = router["groups"],
            best = router["top_groups"];
    if (chosen > count) wrong("router.top_k", "exceeds the number of experts");
    if (count % groups) wrong("router.groups", "do not divide the experts");
    if (best > groups)
      wrong("router.top_groups", "exceeds the number of groups");
    else if (chosen > times(best, count / groups))
      wrong("router.top_k", "exceeds the experts of top_groups");
  }

  Rope rotation(const Json& json) {
    Layer fields{json, "RopeConfig"};
    const Json& scaling = fields.get("scaling");
    Rope out{fields.get("theta").number(), fields["dim"]};
    if (out.dim % 2) wrong("rope.dim", "is odd");
    if (out.dim > MOST_ROTATED) wrong("rope.dim", "is larger than any model needs");
    if (!scaling.is(Json::null)) scale(out, {scaling, "RopeScaling"});
    return out;
  }

  void scale(Rope& rope, const Layer& fields) {
    auto number = [&](const char* key) { return fields.get(key).number(); };
    rope.scaling = fields.get("kind").string(), rope.factor = number("factor");
    rope.low = number("low_freq_factor"), rope.high = number("high_freq_factor");
    rope.fast = number("beta_fast"), rope.slow = number("beta_slow");
    rope.original_context = number("original_context");
    rope.truncate = fields.get("truncate").truth();
    for (const Json& each : fields.get("factors").items())
      rope.factors.push_back(float(each.number()));
    if (rope.low >= rope.high)
      wrong("rope.scaling.low_freq_factor", "is not below high_freq_factor");
    if (rope.slow >= rope.fast) wrong("rope.scaling.beta_slow", "is not below beta_fast");
    if (rope.scaling == "yarn" && rope.theta <= 1)
      wrong("rope.theta", "is not above 1, which yarn requires");
    if (int64_t(rope.factors.size()) != (rope.scaling == "each" ? rope.dim / 2 : 0))
      wrong("rope.scaling.factors", "are not one per pair of values, or not for this kind");
  }

  Config& config_;
  Faults& faults_;
  std::string at_;
  bool parallel_ = false, aside_ = false;  // of the layer before
};

// The ids that a tied head computes logits of.
void check_head(const Json& model, int64_t vocab, Faults& faults) {
  const Json *ids = model.find("head_ids"), *tied = model.find("tie_embeddings");
  if (!ids || ids->is(Json::null)) return;
  int64_t last = -1;
  bool ascend = !ids->items().empty();
  for (const Json& id : ids->items()) {
    ascend = ascend && last < id.whole() && id.whole() < vocab;
    last = id.whole();
  }
  if (!ascend)
    faults.add("model.head_ids", "are not ascending ids below " + std::to_string(vocab));
  if (tied && !tied->truth())
    faults.add("model.head_ids", "choose rows of the embedding, and the head is not tied to it");
}

}  // namespace

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
  reader.end();
  check_head(model, out.vocab, faults);
  std::sort(out.conv_widths.begin(), out.conv_widths.end());
  return out;
}

}  // namespace edge_lib
