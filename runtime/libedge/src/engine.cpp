#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>

namespace edge_lib {

namespace {

constexpr int64_t CAPACITY = 4096, MAX_CAPACITY = 1 << 24, MAX_HISTORY = 1 << 28;
constexpr int MAX_THREADS = 1024;
const char WEIGHTS[] = "weights.bin";

void within(int64_t value, int64_t most, const char* name) {
  if (value < 1 || value > most)
    throw Fault{EDGE_ERROR_INPUT,
                "must be 1 to " + std::to_string(most) + ", got " + std::to_string(value), "",
                name};
}

}  // namespace

OpenBundle::OpenBundle(const std::string& path) : bundle(path), plan(Plan::of(bundle)) {
  give_back();  // parsed JSON took several times the memory of the plan
}

SessionSizes SessionSizes::of(const Bundle& bundle, const edge_session_options* options) {
  const Config& config = bundle.config;
  edge_session_options usual = EDGE_SESSION_OPTIONS;
  const edge_session_options& given = options ? *options : usual;
  SessionSizes out{given.window, 0, given.history, given.has_seed != 0, given.seed};
  within(given.window, MAX_WINDOW, "window");
  within(given.history, MAX_HISTORY, "history");
  if (config.caches.empty()) return out;
  out.capacity = given.capacity;
  if (!given.capacity)
    out.capacity = std::min(config.max_context ? config.max_context : CAPACITY, CAPACITY);
  within(out.capacity, config.max_context ? config.max_context : MAX_CAPACITY, "capacity");
  // twice the room that is needed: StateLayout.sliding in runtime/layout.py says why
  int64_t needed = plus(config.looks_back() - 1, out.window);
  out.slots = std::min(out.capacity, plus(times(2, needed), std::max(bundle.chunk, out.window)));
  return out;
}

void Offsets::add(const std::string& name, int64_t size) {
  at[name] = total;
  total = plus(total, up_to(size, ALIGNMENT));
}

// Adjacent weights form a segment, gaps are left out, and weights keep their alignment in the file.
WeightPlaces::WeightPlaces(const Plan& plan) {
  std::vector<const PlanWeight*> sorted;
  for (const auto& [name, weight] : plan.weights) sorted.push_back(&weight);
  std::sort(sorted.begin(), sorted.end(), [](auto a, auto b) { return a->offset < b->offset; });
  for (const PlanWeight* weight : sorted) {
    int64_t start = weight->offset - weight->offset % ALIGNMENT;
    int64_t end = weight->offset + std::max<int64_t>(1, weight->elements * item_size(weight->type));
    if (!segments.empty() && start - segments.back().end < ALIGNMENT)
      segments.back().end = std::max(segments.back().end, end);
    else
      segments.push_back({start, end, 0});
  }
  for (Segment& segment : segments) {
    segment.at = up_to(total, ALIGNMENT);
    total = segment.at + segment.end - segment.start;
  }
  for (const auto& [name, each] : plan.inlined)
    inlined.add(name, std::max<int64_t>(1, int64_t(each.bytes.size())));
}

int64_t WeightPlaces::place(int64_t offset) const {
  auto after = std::upper_bound(segments.begin(), segments.end(), offset,
                                [](int64_t at, const Segment& s) { return at < s.start; });
  const Segment& segment = *(after - 1);
  return segment.at + offset - segment.start;
}

namespace {

struct Life {
  std::string name;
  size_t first, last;
  int64_t size, at;
};

// Values share memory if their lifetimes do not overlap. They are placed largest first, each at the
// lowest offset that is free for its whole lifetime, as in runtime/cuda/runs.py.
Offsets placed(const Plan& plan, const PlanProgram& program, const Sizes& sizes) {
  std::map<std::string, Life> found;
  for (size_t step = 0; step < program.launches.size(); step++)
    for (const PlanArgument& a : plan.launches[program.launches[step]].arguments)
      if (a.kind == PlanArgument::pointer && a.space == Space::value)
        found.insert({a.name, {a.name, step, step, 0, 0}}).first->second.last = step;
  std::vector<Life> lives;
  for (auto& [name, life] : found) {
    if (name == "logits") life.last = program.launches.size() - 1;  // read after the run
    const PlanBuffer& buffer = plan.values.at(name);
    life.size = up_to(times(buffer.elements.value(sizes), item_size(buffer.type)), ALIGNMENT);
    lives.push_back(life);
  }
  std::stable_sort(lives.begin(), lives.end(), [](const Life& a, const Life& b) {
    return a.size != b.size ? a.size > b.size : a.first < b.first;
  });
  Offsets out;
  std::vector<const Life*> there;  // placed values, by offset
  for (Life& life : lives) {
    for (const Life* other : there) {
      if (other->first > life.last || life.first > other->last) continue;
      if (other->at - life.at >= life.size) break;
      life.at = std::max(life.at, other->at + other->size);
    }
    out.at[life.name] = life.at;
    out.total = std::max(out.total, plus(life.at, life.size));
    if (!life.size) continue;
    auto behind = [](int64_t at, const Life* other) { return at < other->at; };
    there.insert(std::upper_bound(there.begin(), there.end(), life.at, behind), &life);
  }
  return out;
}

}  // namespace

ProgramLayout::ProgramLayout(const Plan& plan, const PlanProgram& program, const Sizes& sizes)
    : largest(sizes) {
  plan.check_sizes(program, sizes);
  for (size_t index : program.launches)
    for (const PlanArgument& a : plan.launches[index].arguments) {
      if (a.kind != PlanArgument::pointer || a.space != Space::input || inputs.at.count(a.name))
        continue;
      int64_t elements = plan.inputs.at(a.name).elements.value(sizes);
      inputs.add(a.name,
                 times(item_size(plan.inputs.at(a.name).type), std::max<int64_t>(1, elements)));
    }
  values = placed(plan, program, sizes);
}

RunLayouts::RunLayouts(const Bundle& bundle, const Plan& plan, const SessionSizes& sizes) {
  int64_t longest = std::max(bundle.chunk, sizes.window);
  for (const PlanProgram& program : plan.programs) {
    bool settle = program.kind == PlanProgram::settle, any = program.max_rows == HUGE_SIZE;
    int64_t most = program.kind == PlanProgram::tree ? sizes.window : longest;
    int64_t tokens = settle ? 0 : std::min(most, program.max_rows);
    int64_t rows = settle ? 0 : any ? sizes.window : tokens;
    programs.emplace_back(plan, program,
                          Sizes{{tokens, 1, rows, sizes.capacity, log_slots(sizes.window), sizes.slots}});
    inputs = std::max(inputs, programs.back().inputs.total);
    values = std::max(values, programs.back().values.total);
  }
}

StateLayout::StateLayout(const Config& config, const Plan& plan, const SessionSizes& sizes) {
  auto put = [](std::vector<Tensor>& list, int64_t& block, const Tensor& tensor, int64_t slots) {
    list.push_back(tensor);
    list.back().offset = block;
    block = plus(block, up_to(times(slots, tensor.slot), ALIGNMENT));
  };
  for (const Shape& shape : config.recurrent) {
    DType type = plan.states.at(shape.name).type;
    int64_t slot = times(shape.elements(), item_size(type));
    put(recurrent, block, {shape.name, shape.dims, type, 0, slot}, state_slots(sizes.window));
    slot_bytes = plus(slot_bytes, slot);
  }
  for (const auto& [name, log] : plan.logs)
    put(logs, block, {name, {log.width}, log.type, 0, times(log.width, item_size(log.type))},
        log_slots(sizes.window));
  for (size_t i = 0; i < config.caches.size(); i++) {
    Shape shape = config.caches[i];
    bool slides = config.windows[i] && sizes.slots < sizes.capacity;
    if (slides) looks_back = config.looks_back();
    shape.dims[2] = slides ? sizes.slots : sizes.capacity;
    DType type = plan.caches.at(shape.name).type;
    int64_t bytes = times(shape.elements(), item_size(type));
    put(caches, cache_block, {shape.name, shape.dims, type, 0, bytes, slides}, 1);
    cache_bytes = plus(cache_bytes, bytes);
  }
}

int64_t StateLayout::copy_bytes(int64_t position) const {
  int64_t out = 0;
  for (const Tensor& cache : caches)
    out = plus(out, times(times(cache.dims[1], rows(cache, position)), cache.row()));
  return out;
}

namespace {

void check_pinnable(int threads) {
  int cpus = edge_cpu_pinnable();
  if (!cpus)
    throw Fault{EDGE_ERROR_ENGINE, "threads cannot be pinned on this system", "", "pin"};
  if (threads > cpus)
    throw Fault{EDGE_ERROR_INPUT,
                "cannot pin " + std::to_string(threads) + " threads: the caller may use " +
                    std::to_string(cpus) + " CPUs",
                "", "pin"};
}

}  // namespace

Engine::Engine(std::shared_ptr<const OpenBundle> opened, int threads, const char* set, bool pin)
    : opened_(std::move(opened)), places_(opened_->plan), threads_(threads), process_(getpid()) {
  within(threads, MAX_THREADS, "threads");
  if (pin) check_pinnable(threads);
  char names[256];
  edge_cpu_sets(names, sizeof names);
  std::istringstream here(names);
  for (std::string each; here >> each;)
    if (!set || each == set) set_ = each;  // the best one is last
  if (set_.empty())
    throw Fault{EDGE_ERROR_INPUT, "this machine has no " + brief(set) + ", only: " + names, "",
                "instruction_set"};
  try {
    load_kernels();
    load_weights();
    interleave_weights();
    pool_ = edge_cpu_pool(threads, 0, pin);
    if (!pool_)
      throw Fault{EDGE_ERROR_ENGINE, "no " + std::to_string(threads) + " threads could be started",
                  "", "threads"};
    give_back();  // blocks of weights
  } catch (...) {
    free_all();
    throw;
  }
}

Engine::~Engine() { free_all(); }

void Engine::free_all() {
  // a forked child does not have the threads and would wait for them forever
  if (pool_ && (threads_ == 1 || process_ == getpid())) edge_cpu_pool_free(pool_);
  for (void* kernel : kernels_) edge_cpu_kernel_free(kernel);
}

void Engine::load_kernels() {
  const auto& variants = plan().variants;
  kernels_.assign(variants.size(), nullptr);
  Faults faults;
  for (const PlanProgram& program : plan().programs)
    for (size_t index : program.launches) {
      size_t variant = plan().launches[index].variant;
      if (kernels_[variant]) continue;
      char problem[512] = "";
      kernels_[variant] =
          edge_cpu_kernel(set_.c_str(), variants[variant].text.c_str(), problem, sizeof problem);
      if (!kernels_[variant]) faults.add("variants." + std::to_string(variant), problem);
    }
  faults.refuse(EDGE_ERROR_BUNDLE, plan().file);
}

void Engine::load_weights() {
  inlined_ = Memory(places_.inlined.total);
  for (const auto& [name, each] : plan().inlined)
    std::memcpy(inlined(name), each.bytes.data(), each.bytes.size());
  if (places_.segments.empty()) return;
  check_room(places_.total);
  weights_ = Memory(places_.total);
  int64_t at = 0;
  size_t first = 0;  // first unfinished segment
  bundle().read(WEIGHTS, [&](const char* data, size_t size) {
    int64_t end = at + int64_t(size);
    for (size_t i = first; i < places_.segments.size() && places_.segments[i].start < end; i++) {
      const auto& segment = places_.segments[i];
      int64_t from = std::max(at, segment.start), to = std::min(end, segment.end);
      if (from < to)
        std::memcpy(weights_.data() + segment.at + from - segment.start, data + (from - at),
                    size_t(to - from));
      if (segment.end <= end) first = i + 1;
    }
    at = end;
  });
}

// The counterpart of runtime/cpu/interleave.py.
void Engine::interleave_weights() {
  std::vector<EdgeCpuReader> readers;
  for (const PlanProgram& program : plan().programs)
    for (size_t index : program.launches) {
      const PlanLaunch& launch = plan().launches[index];
      for (size_t place = 0; place < launch.arguments.size(); place++) {
        const PlanArgument& a = launch.arguments[place];
        if (a.kind != PlanArgument::pointer || a.space != Space::weight) continue;
        const PlanWeight& read = plan().weights.at(a.name);
        readers.push_back({kernels_[launch.variant], a.at ? -1 : int64_t(place), weight(read),
                           read.elements * item_size(read.type)});
      }
    }
  int refused = edge_cpu_interleave(readers.data(), int64_t(readers.size()));
  if (refused == 2)
    throw Fault{EDGE_ERROR_BUNDLE, "the plan reads a weight beyond the largest possible size", "",
                "plan"};
  if (refused) throw std::bad_alloc();
}

char* Engine::weight(const PlanWeight& weight) const {
  return weights_.data() + places_.place(weight.offset);
}

std::shared_ptr<Memory> Engine::values(int64_t size) {
  std::lock_guard<std::mutex> lock(turn_);
  if (!values_ || values_->size() < size) {
    auto larger = std::make_shared<Memory>(size);
    larger->touch();
    values_ = std::move(larger);
  }
  return values_;
}

void Engine::check_process() const {
  if (threads_ > 1 && getpid() != process_)
    throw Fault{EDGE_ERROR_ENGINE,
                "the model was loaded before this process was forked: its threads are not here", "",
                ""};
}

void Engine::run(const EdgeCpuCall* calls, int64_t count) {
  check_process();
  if (edge_cpu_run(pool_, calls, count)) throw std::bad_alloc();
}

void Engine::level() {
  std::lock_guard<std::mutex> turn(turn_);
  check_process();
  if (edge_cpu_level(pool_)) throw std::bad_alloc();
}

}  // namespace edge_lib
