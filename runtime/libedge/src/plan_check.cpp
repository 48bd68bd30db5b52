// Checks of a launch plan before any of it runs, as in edge/launch_checks.py.
#include <algorithm>

#include "plan.h"

namespace edge_lib {

namespace {

constexpr int64_t GRID[] = {INT32_MAX, 65535, 65535};
constexpr int64_t MOST_BYTES = int64_t(1) << 42;  // of a buffer; far beyond any machine

class Check {
 public:
  Check(const Plan& plan, const Bundle& bundle, Faults& faults)
      : plan_(plan), config_(bundle.config), faults_(faults) {}

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
        faults_.add("inputs." + name, "is not an input that this version knows");
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
                  "lack one for runs of any length, or one that advances the state alone");
  }

  void launch(size_t number) {
    const PlanLaunch& launch = plan_.launches[number];
    const PlanVariant& variant = plan_.variants[launch.variant];
    for (size_t i = 0; i < launch.arguments.size(); i++)
      argument("launches." + std::to_string(number) + "." + variant.names[i], variant.types[i],
               launch.arguments[i]);
    if (variant.kernel == "attention.attend") windows(number, launch, variant.window);
  }

 private:
  static Size size(int64_t times, const char* of) {
    Size out;
    out.times = times, out.of = of;
    return out;
  }

  // Attention must look back as far as the config says: sessions keep no more than that.
  void windows(size_t number, const PlanLaunch& launch, int64_t found) {
    for (const PlanArgument& a : launch.arguments)
      for (size_t i = 0; i < config_.caches.size(); i++)
        if (a.kind == PlanArgument::pointer && a.space == Space::cache &&
            a.name == config_.caches[i].name && config_.windows[i] != found)
          faults_.add("launches." + std::to_string(number),
                      "looks back " + std::to_string(found) + " positions in " + a.name + ", not " +
                          std::to_string(config_.windows[i]) + " as the model does (0: all)");
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
    std::optional<Operand> found = plan_.operand(argument);
    if (!found)
      return faults_.add(where, std::string("there is no ") + SPACES[int(argument.space)] + " " +
                                    argument.name);
    auto [type, elements, offset] = *found;
    static const std::map<std::string, DType> types = {{"fp32", DType::f32}, {"fp16", DType::f16},
                                                       {"i8", DType::i8},    {"u8", DType::u8},
                                                       {"i32", DType::i32},  {"i64", DType::i64}};
    auto read = types.find(base);
    if (read == types.end() || read->second != type)
      faults_.add(where, "reads " + argument.name + " as " + base + ", which has another type");
    if (elements > 0 && argument.at >= elements)
      faults_.add(where, "points to element " + std::to_string(argument.at) + " of " +
                             std::to_string(elements) + " of " + argument.name);
    if (multiple && (offset + argument.at * item_size(type)) % 16)
      faults_.add(where, "reads " + argument.name + " where it is not aligned to 16 bytes");
  }

  const Plan& plan_;
  const Config& config_;
  Faults& faults_;
};

}  // namespace

void check_plan(const Plan& plan, const Bundle& bundle, const Json& rotations, Faults& faults) {
  Check check(plan, bundle, faults);
  const Bundle::Entry* weights = bundle.entry("weights.bin");
  check.weights(weights ? weights->size : 0);
  check.inputs(rotations);
  check.logs();
  check.programs();
  for (size_t i = 0; i < plan.launches.size(); i++) check.launch(i);
}

void Plan::check_sizes(const PlanProgram& program, const Sizes& sizes) const {
  Faults faults;
  for (size_t number : program.launches) {
    const PlanLaunch& launch = launches[number];
    std::string at = "launches." + std::to_string(number) + ".";
    for (int axis = 0; axis < 3; axis++)
      if (launch.grid[axis].value(sizes) > GRID[axis])
        faults.add(at + "grid", "is larger than can be launched");
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

}  // namespace edge_lib
