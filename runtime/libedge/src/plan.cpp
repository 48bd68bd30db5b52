#include "plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "schema.h"

namespace edge_lib {

namespace {

constexpr int64_t LARGEST = 64 << 20;  // bytes of a plan
const char SYMBOLS[] = "TBLCSW";

Size size_from(const Json& json) {
  Size out;
  if (const Json* found = json.find("times")) out.times = found->whole();
  if (const Json* found = json.find("per")) out.per = found->whole();
  if (const Json* found = json.find("of")) out.of = found->string();
  return out;
}

PlanArgument argument_from(const Json& json) {
  PlanArgument out{PlanArgument::number, Space::value, "", 0, {}, 0};
  if (!json.is(Json::object)) {
    out.real = json.number();
  } else if (const Json* space = json.find("space")) {
    out.kind = PlanArgument::pointer;
    while (space->string() != SPACES[int(out.space)]) out.space = Space(int(out.space) + 1);
    out.name = json["name"].string();
    if (const Json* at = json.find("at")) out.at = at->whole();
  } else {
    out.kind = PlanArgument::size;
    out.whole = size_from(json);
  }
  return out;
}

std::string bytes_from(const std::string& hexadecimal) {
  auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  std::string out(hexadecimal.size() / 2, '\0');
  for (size_t i = 0; i < out.size(); i++)
    out[i] = char(digit(hexadecimal[2 * i]) << 4 | digit(hexadecimal[2 * i + 1]));
  return out;
}

// Calls `take` with each name (or index) and value of an optional object (or array).
template <class F>
void each(const Json& plan, const char* key, F take) {
  const Json* found = plan.find(key);
  for (size_t i = 0; found && i < found->items().size(); i++)
    take(found->is(Json::object) ? found->keys()[i] : std::to_string(i), found->items()[i]);
}

bool one_word(const std::string& text) {
  return !text.empty() && std::none_of(text.begin(), text.end(),
                                       [](char c) { return uint8_t(c) <= ' ' || c == 0x7f; });
}

PlanVariant variant_from(const Json& json, const std::string& at, Faults& faults) {
  PlanVariant out;
  out.kernel = json["kernel"].string();
  out.text = "kernel " + out.kernel;
  for (const Json& name : json["arguments"].items()) out.names.push_back(name.string());
  for (const Json& type : json["types"].items()) out.types.push_back(type.string());
  std::set<std::string> known(out.names.begin(), out.names.end());
  bool words = true;
  for (size_t i = 0; i < std::min(out.names.size(), out.types.size()); i++) {
    out.text += "\nargument " + out.names[i] + " " + out.types[i];
    words = words && one_word(out.names[i]);
  }
  size_t count = out.names.size();
  each(json, "constants", [&](const std::string& name, const Json& value) {
    count++;
    known.insert(name);
    std::string shown;
    if (value.is(Json::text))
      shown = value.string();
    else if (value.is(Json::boolean))
      shown = value.truth() ? "1" : "0";
    else if (!value.is(Json::null))
      write_json(shown, value);
    if (name == "WINDOW" && value.is(Json::integer)) out.window = value.whole();
    bool large = value.is(Json::integer) && std::abs(value.number()) > INT32_MAX;
    if (large || shown.size() > 128) faults.add(at + ".constants." + name, "is too large");
    words = words && one_word(name) && (value.is(Json::null) || one_word(shown));
    out.text += "\nconstant " + name + (shown.empty() ? "" : " " + shown);
  });
  if (count > 128 || known.size() < count) faults.add(at, "has too many parameters, or one twice");
  if (!words) faults.add(at, "has a name or constant that is not one word");
  return out;
}

bool near(double a, double b) {
  return std::abs(a - b) <= 1e-6 * std::max(std::abs(a), std::abs(b));
}

bool near(const std::vector<float>& frequencies, const Rope& rope) {
  if (int64_t(frequencies.size()) != rope.dim / 2) return false;
  for (size_t i = 0; i < frequencies.size(); i++)
    if (!near(frequencies[i], rope.frequency(int64_t(i)))) return false;
  return true;
}

// Every rotation, given by theta or by frequencies, must be that of an attention layer.
void read_rotations(Plan& plan, const Json& json, const Config& config, Faults& faults) {
  const Json* tables = json.find("inverses");
  size_t tabled = 0;
  each(json, "rotations", [&](const std::string& index, const Json& rotation) {
    double theta = rotation.items()[0].number();
    int64_t dim = rotation.items()[1].whole();
    const Json* table = tables ? tables->find("rope" + index) : nullptr;
    std::vector<float> own;
    bool fits = false;
    if (theta == 0 && table) {
      tabled++;
      for (const Json& value : table->items()) own.push_back(float(value.number()));
    }
    for (const Rope& rope : config.ropes) {
      if (rope.dim != dim || fits) continue;
      fits = theta == 0 ? near(own, rope)
                        : rope.scaling.empty() && (dim == 2 || near(rope.theta, theta));
    }
    if (!fits)
      faults.add("rotations",
                 "the model has no such rotation of " + std::to_string(dim) + " values");
    for (int64_t i = 0; i < dim / 2 && theta != 0 && fits; i++)
      own.push_back(Rope{theta, dim}.frequency(i));
    plan.inverses.push_back(std::move(own));
  });
  if (tables && tables->items().size() != tabled)
    faults.add("inverses", "do not match the rotations");
}

void read_tables(Plan& plan, const Json& json) {
  auto buffer = [](const Json& v) {
    return PlanBuffer{dtype_of(v["dtype"].string()), size_from(v["elements"])};
  };
  each(json, "values", [&](auto& name, auto& v) { plan.values[name] = buffer(v); });
  each(json, "inputs", [&](auto& name, auto& v) { plan.inputs[name] = buffer(v); });
  each(json, "weights", [&](auto& name, auto& v) {
    plan.weights[name] = {dtype_of(v["dtype"].string()), v["offset"].whole(),
                          v["elements"].whole()};
  });
  each(json, "inline", [&](auto& name, auto& v) {
    plan.inlined[name] = {dtype_of(v["dtype"].string()), bytes_from(v["data"].string())};
  });
  each(json, "logs", [&](auto& name, auto& v) {
    plan.logs[name] = {dtype_of(v["dtype"].string()), v["width"].whole()};
  });
  each(json, "taps", [&](auto&, auto& v) { plan.taps.push_back(v.whole()); });
}

void read_launches(Plan& plan, const Json& json, Faults& faults) {
  each(json, "variants", [&](auto& index, auto& v) {
    plan.variants.push_back(variant_from(v, "variants." + index, faults));
  });
  plan.launches.reserve(json["launches"].items().size());
  each(json, "launches", [&](auto& index, auto& v) {
    PlanLaunch out;
    std::string at = "launches." + index;
    out.variant = size_t(v["variant"].whole());
    for (int i = 0; i < 3; i++) out.grid[i] = size_from(v["grid"].items()[size_t(i)]);
    out.arguments.reserve(v["arguments"].items().size());
    for (const Json& argument : v["arguments"].items())
      out.arguments.push_back(argument_from(argument));
    size_t count = out.arguments.size();
    if (out.variant >= plan.variants.size())
      faults.add(at, "names an unknown variant");
    else if (count != plan.variants[out.variant].names.size() ||
             count != plan.variants[out.variant].types.size())
      faults.add(at, "its arguments do not match " + plan.variants[out.variant].kernel);
    plan.launches.push_back(std::move(out));
  });
  each(json, "programs", [&](auto& index, auto& v) {
    const std::string& kind = v["kind"].string();
    PlanProgram out;
    out.kind = kind == "chain"  ? PlanProgram::chain
               : kind == "tree" ? PlanProgram::tree
                                : PlanProgram::settle;
    // only GPUs have special kernels for trees of many rows
    bool any = v["max_rows"].is(Json::null) || out.kind == PlanProgram::tree;
    out.max_rows = any ? HUGE_SIZE : v["max_rows"].whole();
    for (const char* key : {"launches", "picks"})
      each(v, key, [&](auto&, auto& launch) {
        if (launch.whole() >= int64_t(plan.launches.size()))
          faults.add("programs." + index, "names a launch that does not exist");
        else if (*key == 'l')
          out.launches.push_back(size_t(launch.whole()));
      });
    plan.programs.push_back(std::move(out));
  });
}

// Gives launches on caches with a window the past counted from the caches' first slot, and the
// caches' number of slots: see runtime/cuda/sliding.py.
void slide(Plan& plan, const Config& config) {
  auto windowed = [&](const PlanArgument& a) {
    if (a.kind != PlanArgument::pointer || a.space != Space::cache) return false;
    for (size_t i = 0; i < config.caches.size(); i++)
      if (config.caches[i].name == a.name) return config.windows[i] > 0;
    return false;
  };
  for (PlanLaunch& launch : plan.launches) {
    if (std::none_of(launch.arguments.begin(), launch.arguments.end(), windowed)) continue;
    for (PlanArgument& a : launch.arguments) {
      bool input = a.kind == PlanArgument::pointer && a.space == Space::input;
      if (input && a.name == "run") a.name = SLIDING_RUN;
      if (a.kind == PlanArgument::size && a.whole.of == "C") a.whole.of = "W";
    }
  }
  auto run = plan.inputs.find("run");
  if (run != plan.inputs.end()) plan.inputs[SLIDING_RUN] = run->second;
}

}  // namespace

int64_t Size::value(const Sizes& sizes) const {
  int64_t out = times;
  for (char symbol : of)
    out = edge_lib::times(out, sizes.of[std::strchr(SYMBOLS, symbol) - SYMBOLS]);
  return out / per + (out % per != 0);
}

std::optional<Operand> Plan::operand(const PlanArgument& a) const {
  auto in = [&](const auto& table, auto form) {
    auto found = table.find(a.name);
    return found == table.end() ? std::nullopt : std::optional<Operand>(form(found->second));
  };
  auto whole = [](const auto& each) { return Operand{each.type, each.elements, 0}; };
  auto open = [](const PlanBuffer& each) { return Operand{each.type, -1, 0}; };
  switch (a.space) {
    case Space::weight:
      return in(weights, [](const auto& w) { return Operand{w.type, w.elements, w.offset}; });
    case Space::inlined:
      return in(inlined, [](const auto& each) {
        return Operand{each.type, int64_t(each.bytes.size()) / item_size(each.type), 0};
      });
    case Space::log:
      return in(logs, [](const auto& log) { return Operand{log.type, log.width, 0}; });
    case Space::state:
      return in(states, whole);
    case Space::cache:
      return in(caches, whole);
    default:
      return in(a.space == Space::value ? values : inputs, open);
  }
}

Plan Plan::of(const Bundle& bundle) {
  const Json* named = bundle.manifest["graphs"].find("cuda");
  if (!named)
    throw Fault{EDGE_ERROR_BUNDLE, "has no launch plan; export the model again",
                bundle.path() + "/manifest.json", "graphs.cuda"};
  Plan plan;
  plan.file = bundle.path() + "/" + named->string();
  Json json =
      parse_document(bundle.read(named->string(), LARGEST), plan.file, Schema::plan(), false);
  Faults faults;
  for (auto [name, most] : {std::pair("variants", 1 << 12),
                            {"launches", 1 << 18},
                            {"programs", 64},
                            {"values", 1 << 15}})
    if (json[name].items().size() > size_t(most))
      faults.add(name, "has more than " + std::to_string(most) + " entries");
  faults.refuse(EDGE_ERROR_BUNDLE, plan.file);  // reading the rest would take too long
  read_tables(plan, json);
  read_launches(plan, json, faults);
  faults.refuse(EDGE_ERROR_BUNDLE, plan.file);  // the rest relies on valid indices
  auto type = [&](const Shape& shape) {
    auto found = bundle.state_dtypes.find(shape.name);
    if (found == bundle.state_dtypes.end()) return DType::f32;
    return found->second == "int8" ? DType::i8 : DType::f16;
  };
  for (const Shape& shape : bundle.config.recurrent)
    plan.states[shape.name] = {type(shape), times(2, shape.elements())};
  for (const Shape& shape : bundle.config.caches)
    plan.caches[shape.name] = {type(shape), times(shape.dims[1], shape.dims[3])};
  read_rotations(plan, json, bundle.config, faults);
  static const Json none = parse_json("[]");
  const Json* rotations = json.find("rotations");
  check_plan(plan, bundle, rotations ? *rotations : none, faults);
  faults.refuse(EDGE_ERROR_BUNDLE, plan.file);
  slide(plan, bundle.config);
  return plan;
}

int Plan::program(PlanProgram::Kind kind, int64_t rows) const {
  for (size_t i = 0; i < programs.size(); i++)
    if (programs[i].kind == kind && rows <= programs[i].max_rows) return int(i);
  return -1;
}

}  // namespace edge_lib
