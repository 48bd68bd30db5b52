#include "plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "schema.h"

namespace edge_lib {

namespace {

constexpr int64_t LARGEST = 64 << 20;  // bytes of the plan
const char SYMBOLS[] = "TBLCS";
const char* const SPACES[] = {"value", "weight", "inline", "input", "state", "log", "cache"};

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

// Calls `take` with each name and value of an object that may be left out.
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
    bool large = value.is(Json::integer) && std::abs(value.number()) > INT32_MAX;
    if (large || shown.size() > 128) faults.add(at + ".constants." + name, "is too large");
    words = words && one_word(name) && (value.is(Json::null) || one_word(shown));
    out.text += "\nconstant " + name + (shown.empty() ? "" : " " + shown);
  });
  if (count > 128 || known.size() < count) faults.add(at, "has too many parameters, or one twice");
  if (!words) faults.add(at, "has a name or constant that is not one word");
  return out;
}

// -- what must fit
// ----------------------------------------------------------------------------------

constexpr int64_t GRID[] = {INT32_MAX, 65535, 65535};
constexpr int64_t MOST_BYTES = int64_t(1) << 42;  // far beyond any machine

bool near(double a, double b) {
  return std::abs(a - b) <= 1e-6 * std::max(std::abs(a), std::abs(b));
}

class Check {
 public:
  Check(const Plan& plan, const Bundle& bundle, Faults& faults)
      : plan_(plan), config_(bundle.config), faults_(faults) {
    for (const Shape& shape : config_.recurrent) states_[shape.name] = times(2, shape.elements());
    for (const Shape& shape : config_.caches)
      caches_[shape.name] = times(shape.dims[1], shape.dims[3]);
  }

  void weights(int64_t bytes) {
    for (const auto& [name, weight] : plan_.weights) {
      int64_t item = item_size(weight.type),
              end = plus(weight.offset, times(weight.elements, item));
      if (end > bytes || weight.offset % item)
        faults_.add("weights." + name,
                    "does not lie in the " + std::to_string(bytes) + " bytes of weights.bin");
    }
    for (const auto& [name, inlined] : plan_.inlined)
      if (inlined.bytes.size() % size_t(item_size(inlined.type)))
        faults_.add("inline." + name, "is not a whole number of elements");
  }

  void inputs(const Json& rotations) {
    std::map<std::string, PlanBuffer> forms = {
        {"run", {DType::i32, size(8, "")}},         {"tokens", {DType::i32, size(1, "TB")}},
        {"rows", {DType::i32, size(1, "L")}},       {"replay", {DType::i32, size(1, "S")}},
        {"slots", {DType::i32, size(1, "T")}},      {"positions", {DType::i32, size(1, "T")}},
        {"ancestors", {DType::i32, size(1, "TT")}},
    };
    for (int64_t width : plan_.taps) {
      const auto& known = config_.conv_widths;
      if (std::find(known.begin(), known.end(), width) == known.end()) {
        faults_.add("taps",
                    "has a width of " + std::to_string(width) + " that the model does not have");
        continue;
      }
      forms["taps" + std::to_string(width)] = {DType::i32, size(width, "T")};
      forms["state_taps" + std::to_string(width)] = {DType::i32, size(width - 1, "")};
    }
    for (size_t i = 0; i < rotations.items().size(); i++) {
      int64_t half = rotations.items()[i].items()[1].whole() / 2;
      for (const char* part : {".cos", ".sin"})
        forms["rope" + std::to_string(i) + part] = {DType::f32, size(half, "T")};
    }
    for (const auto& [name, buffer] : plan_.inputs) {
      auto form = forms.find(name);
      if (form == forms.end() || form->second.type != buffer.type ||
          !(form->second.elements == buffer.elements))
        faults_.add("inputs." + name, "is not an input that this version makes");
    }
  }

  void logs() {
    for (const auto& [name, log] : plan_.logs) {
      int64_t width = 0;
      for (const Shape& known : config_.logs)
        if (known.name == name) width = known.dims[0];
      if (width != log.width)
        faults_.add("logs." + name, "is " + std::to_string(log.width) + " wide, the model keeps " +
                                        std::to_string(width));
    }
  }

  void programs() {
    auto logits = plan_.values.find("logits");
    bool known = logits != plan_.values.end() && logits->second.type == DType::f32 &&
                 logits->second.elements == size(config_.vocab, "LB");
    if (!known)
      faults_.add("values.logits",
                  "are not fp32 of " + std::to_string(config_.vocab) + " tokens and wanted rows");
    bool chain = false, settle = false;
    for (size_t number = 0; number < plan_.programs.size(); number++) {
      const PlanProgram& program = plan_.programs[number];
      bool any = program.max_rows == HUGE_SIZE, makes = false;
      chain = chain || (any && program.kind == PlanProgram::chain);
      settle = settle || (any && program.kind == PlanProgram::settle);
      for (size_t index : program.launches)
        for (const PlanArgument& argument : plan_.launches[index].arguments)
          makes = makes || (argument.kind == PlanArgument::pointer &&
                            argument.space == Space::value && argument.name == "logits");
      if (program.kind != PlanProgram::settle && !makes)
        faults_.add("programs." + std::to_string(number), "makes no logits");
      if (program.launches.size() > 1 << 16)
        faults_.add("programs." + std::to_string(number), "has more than 65536 launches");
    }
    if (!chain || !settle)
      faults_.add("programs",
                  "lack one for chains of any length, or one that stores the state alone");
  }

  void launch(size_t number) {
    const PlanLaunch& launch = plan_.launches[number];
    const PlanVariant& variant = plan_.variants[launch.variant];
    for (size_t i = 0; i < launch.arguments.size(); i++)
      argument("launches." + std::to_string(number) + "." + variant.names[i], variant.types[i],
               launch.arguments[i]);
  }

 private:
  static Size size(int64_t times, const char* of) {
    Size out;
    out.times = times, out.of = of;
    return out;
  }

  void argument(const std::string& where, const std::string& kind, const PlanArgument& argument) {
    bool multiple = kind.find(':') != kind.npos, pointer = kind[0] == '*';
    std::string base = kind.substr(pointer, kind.find(':') - pointer);
    bool fits = pointer ? argument.kind == PlanArgument::pointer
                : base == "fp32"
                    ? argument.kind == PlanArgument::number && !multiple
                    : base == "i32" && argument.kind == PlanArgument::size && !multiple;
    if (!fits) return faults_.add(where, "is not of type " + kind);
    if (!pointer) return;
    DType type;
    int64_t elements = -1, offset = 0;  // -1: it depends on the run
    if (!find(argument, type, elements, offset))
      return faults_.add(where, std::string("the model has no ") + SPACES[int(argument.space)] +
                                    " " + argument.name);
    static const std::map<std::string, DType> types = {{"fp32", DType::f32}, {"fp16", DType::f16},
                                                       {"i8", DType::i8},    {"u8", DType::u8},
                                                       {"i32", DType::i32},  {"i64", DType::i64}};
    auto read = types.find(base);
    if (read == types.end() || read->second != type)
      faults_.add(where, "reads " + argument.name + " as " + base + ", which is of another type");
    if (elements > 0 && argument.at >= elements)
      faults_.add(where, "points to element " + std::to_string(argument.at) + " of " +
                             std::to_string(elements) + " of " + argument.name);
    if (multiple && (offset + argument.at * item_size(type)) % 16)
      faults_.add(where, "reads " + argument.name + " where it is not a multiple of 16 bytes");
  }

  bool find(const PlanArgument& a, DType& type, int64_t& elements, int64_t& offset) const {
    auto given = [&](const auto& table) { return table.find(a.name) != table.end(); };
    switch (a.space) {
      case Space::weight: {
        const PlanWeight& weight = plan_.weights.at(a.name);
        type = weight.type, elements = weight.elements, offset = weight.offset;
        return true;
      }
      case Space::inlined: {
        const PlanInline& inlined = plan_.inlined.at(a.name);
        type = inlined.type, elements = int64_t(inlined.bytes.size()) / item_size(type);
        return true;
      }
      case Space::value:
        type = plan_.values.at(a.name).type;
        return true;
      case Space::input:
        type = plan_.inputs.at(a.name).type;
        return true;
      case Space::log:
        type = plan_.logs.at(a.name).type, elements = plan_.logs.at(a.name).width;
        return true;
      case Space::state:
        if (!given(states_)) return false;
        type = plan_.state_types.at(a.name), elements = states_.at(a.name);
        return true;
      default:
        if (!given(caches_)) return false;
        type = plan_.state_types.at(a.name), elements = caches_.at(a.name);
        return true;
    }
  }

  const Plan& plan_;
  const Config& config_;
  Faults& faults_;
  std::map<std::string, int64_t> states_, caches_;
};

// Angles are those of some attention layer. Where its frequencies are scaled they are as the plan
// says.
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
      fits = theta == 0 ? int64_t(own.size()) == dim / 2
                        : !rope.scaled && (dim == 2 || near(rope.theta, theta));
    }
    if (!fits)
      faults.add("rotations",
                 "the model has no such rotation of " + std::to_string(dim) + " values");
    plan.inverses.push_back(theta == 0 || !fits ? own : powers(theta, dim));
  });
  if (tables && tables->items().size() != tabled)
    faults.add("inverses", "are there for other rotations");
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
  auto has = [&](const PlanArgument& a) {
    switch (a.space) {
      case Space::value:
        return plan.values.count(a.name) > 0;
      case Space::weight:
        return plan.weights.count(a.name) > 0;
      case Space::inlined:
        return plan.inlined.count(a.name) > 0;
      case Space::input:
        return plan.inputs.count(a.name) > 0;
      case Space::log:
        return plan.logs.count(a.name) > 0;
      default:
        return true;
    }
  };
  each(json, "launches", [&](auto& index, auto& v) {
    PlanLaunch out;
    std::string at = "launches." + index;
    out.variant = size_t(v["variant"].whole());
    for (int i = 0; i < 3; i++) out.grid[i] = size_from(v["grid"].items()[size_t(i)]);
    for (const Json& argument : v["arguments"].items())
      out.arguments.push_back(argument_from(argument));
    size_t count = out.arguments.size();
    if (out.variant >= plan.variants.size())
      faults.add(at, "is of an unknown variant");
    else if (count != plan.variants[out.variant].names.size() ||
             count != plan.variants[out.variant].types.size())
      faults.add(at, "has not the arguments of " + plan.variants[out.variant].kernel);
    for (const PlanArgument& a : out.arguments)
      if (a.kind == PlanArgument::pointer && !has(a))
        faults.add(at, std::string("there is no ") + SPACES[int(a.space)] + " " + a.name);
    plan.launches.push_back(std::move(out));
  });
  each(json, "programs", [&](auto& index, auto& v) {
    const std::string& kind = v["kind"].string();
    PlanProgram out;
    out.kind = kind == "chain"  ? PlanProgram::chain
               : kind == "tree" ? PlanProgram::tree
                                : PlanProgram::settle;
    // only GPUs have other kernels for a tree of many rows
    bool any = v["max_rows"].is(Json::null) || out.kind == PlanProgram::tree;
    out.max_rows = any ? HUGE_SIZE : v["max_rows"].whole();
    for (const char* key : {"launches", "picks"})
      each(v, key, [&](auto&, auto& launch) {
        if (launch.whole() >= int64_t(plan.launches.size()))
          faults.add("programs." + index, "names a launch that is not there");
        else if (*key == 'l')
          out.launches.push_back(size_t(launch.whole()));
      });
    plan.programs.push_back(std::move(out));
  });
}

}  // namespace

int64_t Size::value(const Sizes& sizes) const {
  int64_t out = times;
  for (char symbol : of)
    out = edge_lib::times(out, sizes.of[std::strchr(SYMBOLS, symbol) - SYMBOLS]);
  return out / per + (out % per != 0);
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
  faults.refuse(EDGE_ERROR_BUNDLE, plan.file);  // the rest would take for ever
  read_tables(plan, json);
  read_launches(plan, json, faults);
  faults.refuse(EDGE_ERROR_BUNDLE, plan.file);  // the rest follows what is named
  for (const auto* shapes : {&bundle.config.recurrent, &bundle.config.caches})
    for (const Shape& shape : *shapes) {
      auto type = bundle.state_dtypes.find(shape.name);
      bool plain = type == bundle.state_dtypes.end();
      plan.state_types[shape.name] = plain                    ? DType::f32
                                     : type->second == "int8" ? DType::i8
                                                              : DType::f16;
    }
  read_rotations(plan, json, bundle.config, faults);
  Check check(plan, bundle, faults);
  const Bundle::Entry* weights = bundle.entry("weights.bin");
  check.weights(weights ? weights->size : 0);
  static const Json none = parse_json("[]");
  const Json* rotations = json.find("rotations");
  check.inputs(rotations ? *rotations : none);
  check.logs();
  check.programs();
  for (size_t i = 0; i < plan.launches.size(); i++) check.launch(i);
  faults.refuse(EDGE_ERROR_BUNDLE, plan.file);
  return plan;
}

void Plan::check_sizes(const PlanProgram& program, const Sizes& sizes) const {
  Faults faults;
  for (size_t number : program.launches) {
    const PlanLaunch& launch = launches[number];
    std::string at = "launches." + std::to_string(number) + ".";
    for (int axis = 0; axis < 3; axis++)
      if (launch.grid[axis].value(sizes) > GRID[axis])
        faults.add(at + "grid", "is beyond what can be launched");
    for (size_t i = 0; i < launch.arguments.size(); i++) {
      const PlanArgument& argument = launch.arguments[i];
      const std::string& name = variants[launch.variant].names[i];
      if (argument.kind == PlanArgument::size && argument.whole.value(sizes) > INT32_MAX)
        faults.add(at + name, "is beyond 32 bits");
      if (argument.kind != PlanArgument::pointer) continue;
      if (argument.space != Space::value && argument.space != Space::input) continue;
      const auto& table = argument.space == Space::value ? values : inputs;
      int64_t elements = table.at(argument.name).elements.value(sizes);
      if (elements > 0 && argument.at >= elements)
        faults.add(at + name, "points to element " + std::to_string(argument.at) + " of " +
                                  std::to_string(elements) + " of " + argument.name);
    }
  }
  for (const auto* table : {&values, &inputs})
    for (const auto& [name, buffer] : *table)
      if (times(buffer.elements.value(sizes), item_size(buffer.type)) > MOST_BYTES)
        faults.add((table == &values ? "values." : "inputs.") + name, "has too many elements");
  faults.refuse(EDGE_ERROR_BUNDLE, file);
}

int Plan::program(PlanProgram::Kind kind, int64_t rows) const {
  for (size_t i = 0; i < programs.size(); i++)
    if (programs[i].kind == kind && rows <= programs[i].max_rows) return int(i);
  return -1;
}

}  // namespace edge_lib
