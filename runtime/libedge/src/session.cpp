#include "session.h"

#include <cstring>

namespace edge_lib {

// Runs

PreparedProgram::PreparedProgram(const Engine& engine, const ProgramLayout& layout,
                                 const PlanProgram& program, char* inputs, char* values,
                                 const std::map<std::string, char*>& tensors) {
  const Plan& plan = engine.plan();
  auto start = [&](const PlanArgument& a) -> char* {
    switch (a.space) {
      case Space::value:
        return values + layout.values.at.at(a.name);
      case Space::input:
        return inputs + layout.inputs.at.at(a.name);
      case Space::weight:
        return engine.weight(plan.weights.at(a.name));
      case Space::inlined:
        return engine.inlined(a.name);
      default:
        return tensors.at(a.name);
    }
  };
  size_t total = 0;
  for (size_t index : program.launches) total += plan.launches[index].arguments.size();
  values_.reserve(total);  // calls point into it
  calls_.reserve(program.launches.size());
  for (size_t number : program.launches) {
    const PlanLaunch& launch = plan.launches[number];
    calls_.push_back({engine.kernel(launch.variant), values_.data() + values_.size(), {1, 1, 1}, 0});
    for (int axis = 0; axis < 3; axis++) set(&calls_.back().grid[axis], launch.grid[axis], true);
    for (const PlanArgument& argument : launch.arguments) {
      edge_cpu::Value value;
      value.integer = 0;
      if (argument.kind == PlanArgument::pointer)
        value.address = start(argument) + argument.at * item_size(plan.operand(argument)->type);
      if (argument.kind == PlanArgument::number) value.number = float(argument.real);
      values_.push_back(value);
      if (argument.kind == PlanArgument::size)
        set(&values_.back().integer, argument.whole, false);
    }
  }
  holes_.shrink_to_fit();
  results_.resize(sizes_.size());
  for (const auto& [name, at] : layout.inputs.at) writers.emplace_back(plan, name, inputs + at);
  auto logits = layout.values.at.find("logits");
  if (logits != layout.values.at.end())
    logits_ = reinterpret_cast<const float*>(values + logits->second);
}

// Most sizes are the same in all runs.
void PreparedProgram::set(int64_t* target, const Size& size, bool grid) {
  if (!size.of.empty())
    holes_.push_back({target, index(size), grid});
  else
    *target = std::max<int64_t>(grid, size.value({}));
}

size_t PreparedProgram::index(const Size& size) {
  for (size_t i = 0; i < sizes_.size(); i++)
    if (sizes_[i] == size) return i;
  sizes_.push_back(size);
  return sizes_.size() - 1;
}

void PreparedProgram::resize(const Sizes& sizes) {
  if (sizes == last_) return;
  last_ = sizes;
  for (size_t i = 0; i < sizes_.size(); i++) results_[i] = sizes_[i].value(sizes);
  for (const Hole& hole : holes_)
    *hole.target = hole.grid ? std::max<int64_t>(1, results_[hole.size]) : results_[hole.size];
}

Session::Hold::Hold(Session& session) : session_(session) {
  if (session.busy_.exchange(true, std::memory_order_acquire))
    throw Fault{EDGE_ERROR_ENGINE, "is in use by another thread, or by the answer in progress", "",
                "session"};
}

Session::Session(std::shared_ptr<Engine> engine, const SessionSizes& sizes)
    : engine_(std::move(engine)),
      sizes_(sizes),
      layout_(bundle().config, engine_->plan(), sizes),
      ledger_(int(sizes.window)),
      rng_(sizes.has_seed ? Rng(sizes.seed) : Rng::from_system()) {
  RunLayouts layouts(bundle(), engine_->plan(), sizes);
  int64_t logits = times(times(4, sizes.window), bundle().config.vocab);
  edge_lib::check_room(plus(plus(layout_.block, layout_.cache_block),
                            plus(plus(layouts.inputs, layouts.values), logits)));
  state_ = Memory(layout_.block);
  caches_ = Memory(layout_.cache_block, Pages::small);
  inputs_ = Memory(layouts.inputs);
  logits_ = Memory(logits);
  values_ = engine_->values(layouts.values);
  sampler_ = Sampler(size_t(bundle().config.vocab));
  mask_.resize((size_t(bundle().config.vocab) + 31) / 32);
  tokens_.reserve(size_t(sizes.history));
  feed_.reserve(size_t(bundle().chunk));
  tree_tokens_.reserve(size_t(sizes.window));
  // not the values, which are shared and touched already: another session may be running
  for (Memory* each : {&state_, &caches_, &inputs_, &logits_}) each->touch();
  std::map<std::string, char*> tensors;
  for (const auto* list : {&layout_.recurrent, &layout_.logs})
    for (const Tensor& tensor : *list) tensors[tensor.name] = slot(tensor, 0);
  for (const Tensor& tensor : layout_.caches) tensors[tensor.name] = caches_.data() + tensor.offset;
  const auto& plan = engine_->plan();
  for (size_t i = 0; i < plan.programs.size(); i++)
    programs_.emplace_back(*engine_, layouts.programs[i], plan.programs[i], inputs_.data(),
                           values_->data(), tensors);
}

void Session::needs_choice(const char* verb) const {
  if (ledger_.nodes)
    throw Fault{EDGE_ERROR_STATE,
                std::string("cannot ") + verb +
                    ": a tree was run and no node of it selected; select -1 drops it",
                "", ""};
}

void Session::check_room(int64_t position) const {
  if (!layout_.caches.empty() && position > sizes_.capacity)
    throw Fault{EDGE_ERROR_CONTEXT_FULL,
                std::to_string(position) + " tokens do not fit into a context of " +
                    std::to_string(sizes_.capacity),
                "", "tokens"};
}

void Session::check_run(const int32_t* tokens, size_t count, const int32_t* parents,
                        uint32_t flags) const {
  needs_choice("run");
  auto refuse = [](const std::string& message, const char* field) {
    throw Fault{EDGE_ERROR_INPUT, message, "", field};
  };
  if (!tokens || !count) refuse("no tokens to run", "tokens");
  if (flags & ~uint32_t(EDGE_RUN_COMMIT | EDGE_RUN_ALL_ROWS))
    refuse("has bits that this version does not know", "flags");
  bool commit = flags & EDGE_RUN_COMMIT, all = flags & EDGE_RUN_ALL_ROWS;
  if (commit && parents) refuse("a tree cannot be committed", "parents");
  if (int64_t(count) > (commit ? bundle().chunk : sizes_.window))
    refuse(std::to_string(count) + " tokens exceed the " +
               (commit ? "chunk of " + std::to_string(bundle().chunk)
                       : "window of " + std::to_string(sizes_.window)),
           "tokens");
  if (all && int64_t(count) > sizes_.window)
    refuse("logits of all rows are limited to a window of tokens", "flags");
  for (size_t i = 0; i < count; i++) {
    if (tokens[i] < 0 || tokens[i] >= bundle().config.vocab)
      refuse("token ids must be 0 to " + std::to_string(bundle().config.vocab - 1) + ", got " +
                 std::to_string(tokens[i]),
             "tokens");
    if (parents && (parents[i] < -1 || parents[i] >= int32_t(i)))
      refuse("token " + std::to_string(i) + " has parent " + std::to_string(parents[i]) +
                 ": a parent comes before its child, or is -1",
             "parents");
  }
  if (parents && engine_->plan().program(PlanProgram::tree, int64_t(count)) < 0)
    refuse(std::to_string(count) + " tokens are too many for a tree", "parents");
  check_room(ledger_.position + int64_t(count));
}

const float* Session::run(const int32_t* tokens, size_t count, const int32_t* parents,
                          uint32_t flags) {
  check_run(tokens, count, parents, flags);
  bool commit = flags & EDGE_RUN_COMMIT;
  if (!parents && tokens_.capacity() < tokens_.size() + count)
    tokens_.reserve(2 * (tokens_.size() + count));
  ledger_.make_room(commit ? 0 : int(count));
  slide(int64_t(count));
  Step step = commit ? Step::commit(ledger_, int(count)) : Step::run(ledger_, int(count), parents);
  perform(parents ? PlanProgram::tree : PlanProgram::chain,
          {step, tokens, (flags & EDGE_RUN_ALL_ROWS) != 0});
  ledger_ = step.after;
  // a tree's tokens are listed once a path is selected
  if (parents)
    tree_tokens_.assign(tokens, tokens + count);
  else
    tokens_.insert(tokens_.end(), tokens, tokens + count);
  pending_ = -1;
  return reinterpret_cast<const float*>(logits_.data());
}

void Session::perform(PlanProgram::Kind kind, const RunInputs& run) {
  int64_t count = run.step.tokens, rows = run.all_rows ? count : std::min<int64_t>(count, 1),
          vocab = bundle().config.vocab;
  int index = engine_->plan().program(kind, count);
  PreparedProgram& program = programs_[size_t(index)];
  std::lock_guard<std::mutex> turn(engine_->turn());
  for (const InputWriter& writer : program.writers) writer.write(run);
  program.resize(Sizes{{count, 1, rows, sizes_.capacity, log_slots(sizes_.window), sizes_.slots}});
  rows_ = 0;
  engine_->run(program.calls(), program.count());
  float* out = reinterpret_cast<float*>(logits_.data());
  if (rows) std::memcpy(out, program.logits(), size_t(rows * vocab) * sizeof *out);
  if (!finite(logits_.data(), rows * vocab * int64_t(sizeof *out), DType::f32))
    throw Fault{EDGE_ERROR_ENGINE,
                "the logits are not finite: check the bundle, or clear the session", "", "logits"};
  rows_ = rows;
}

void Session::prepare() {
  if (ledger_.position)
    throw Fault{EDGE_ERROR_STATE, "can only be prepared before its first token", "", "session"};
  int64_t longest =
      layout_.caches.empty() ? bundle().chunk : std::min(bundle().chunk, sizes_.capacity);
  for (int64_t count : {longest, std::min(sizes_.window, longest), int64_t(1)})
    perform(PlanProgram::chain, {Step::rehearsal(ledger_, int(count)), nullptr, false});
  apply();
  engine_->level();
  rows_ = 0;
}

void Session::apply() { perform(PlanProgram::settle, {Step::applied(ledger_), nullptr, false}); }

// Operations on the state

void Session::forget(int64_t count) {
  tokens_.resize(size_t(std::max<int64_t>(0, int64_t(tokens_.size()) - count)));
  pending_ = -1;
  rows_ = 0;
}

void Session::select(int32_t node) {
  if (!ledger_.nodes) throw Fault{EDGE_ERROR_STATE, "no tree was run to select from", "", ""};
  if (node < -1 || node >= ledger_.nodes)
    throw Fault{EDGE_ERROR_INPUT,
                "the tree has no node " + std::to_string(node) + ": it has " +
                    std::to_string(ledger_.nodes),
                "", "node"};
  int16_t path[MAX_WINDOW];
  int64_t start = ledger_.position;
  int length = ledger_.choose(node, path);
  // parents come before children, so no row is overwritten unread
  for (int i = 0; i < length; i++) {
    if (path[i] != i) move_row(start + path[i], start + i);
    tokens_.push_back(tree_tokens_[size_t(path[i])]);
  }
  pending_ = -1;
  rows_ = 0;
}

void Session::move_row(int64_t from, int64_t to) {
  for (const Tensor& cache : layout_.caches)
    for (int64_t head = 0; head < cache.dims[1]; head++)
      std::memcpy(cache_row(cache, head, to, ledger_.first),
                  cache_row(cache, head, from, ledger_.first), size_t(cache.row()));
}

void Session::slide(int64_t count) {
  if (!layout_.looks_back || ledger_.position - ledger_.first + count <= sizes_.slots) return;
  int64_t first = layout_.first_needed(ledger_.position - ledger_.reach());
  // there are enough slots that the moved rows overwrite none that are needed
  for (const Tensor& cache : layout_.caches)
    for (int64_t head = 0; cache.slides && head < cache.dims[1]; head++)
      std::memcpy(cache_row(cache, head, first, first), cache_row(cache, head, first, ledger_.first),
                  size_t((ledger_.position - first) * cache.row()));
  ledger_.first = first;
}

void Session::rewind(size_t count) {
  needs_choice("rewind");
  if (int64_t(count) > ledger_.reach())
    throw Fault{EDGE_ERROR_STATE,
                "cannot rewind " + std::to_string(count) +
                    " tokens: " + std::to_string(ledger_.reach()) + " can be taken back",
                "", "count"};
  ledger_.back(int(count));
  if (count) forget(int64_t(count));
}

void Session::clear() {
  ledger_.make_room(0);
  Ledger after = ledger_.elsewhere(0, 0);
  for (const Tensor& tensor : layout_.recurrent)
    std::memset(slot(tensor, after.source()), 0, size_t(tensor.slot));
  ledger_ = after;
  forget(int64_t(tokens_.size()));
  messages_ = "[]", extra_.clear();
}

std::unique_ptr<Session> Session::fork() {
  needs_choice("fork");
  std::unique_ptr<Session> copy(new Session(engine_, sizes_));
  std::memcpy(copy->state_.data(), state_.data(), size_t(layout_.block));
  // after a rewind, tokens look back further than the rows of `copy_rows`, so copy all
  for (const Tensor& cache : layout_.caches)
    for (int64_t head = 0; head < cache.dims[1]; head++) {
      int64_t first = cache.slides ? ledger_.first : 0;
      std::memcpy(copy->cache_row(cache, head, first, first),
                  cache_row(cache, head, first, first),
                  size_t((ledger_.position - first) * cache.row()));
    }
  copy->ledger_ = ledger_;
  copy->tokens_ = tokens_;
  copy->tokens_.reserve(tokens_.capacity());
  copy->pending_ = pending_, copy->rng_ = rng_;
  copy->messages_ = messages_, copy->extra_ = extra_;
  copy->rows_ = rows_;
  std::memcpy(copy->logits_.data(), logits_.data(), size_t(logits_.size()));
  return copy;
}

void Session::copy_rows(char* bytes) {
  for (const Tensor& cache : layout_.caches) {
    int64_t rows = layout_.rows(cache, ledger_.position), size = rows * cache.row();
    for (int64_t head = 0; head < cache.dims[1]; head++, bytes += size)
      std::memcpy(bytes, cache_row(cache, head, ledger_.position - rows, ledger_.first),
                  size_t(size));
  }
}

void Session::take_rows(const Tensor& cache, const char* bytes, int64_t rows, int64_t position,
                        int64_t first) {
  int64_t row = cache.row(), kept = cache.slides ? std::min(rows, position - first) : rows;
  for (int64_t head = 0; head < cache.dims[1]; head++, bytes += rows * row) {
    if (!cache.slides)
      std::memset(cache_row(cache, head, 0, first), 0, size_t((position - rows) * row));
    std::memcpy(cache_row(cache, head, position - kept, first), bytes + (rows - kept) * row,
                size_t(kept * row));
  }
}

std::unique_ptr<Snapshot> Session::snapshot() {
  needs_choice("snapshot");
  std::unique_ptr<Snapshot> out(new Snapshot);
  out->model = bundle().model_identity;
  out->position = ledger_.position, out->rows = ledger_.count();
  for (const Tensor& tensor : layout_.recurrent) {
    const char* from = slot(tensor, ledger_.source());
    out->state.insert(out->state.end(), from, from + tensor.slot);
  }
  for (const Tensor& log : layout_.logs)
    for (int i = 0; i < ledger_.count(); i++) {
      const char* from = slot(log, ledger_.pending()[i]);
      out->logs.insert(out->logs.end(), from, from + log.slot);
    }
  out->kv.resize(size_t(layout_.copy_bytes(ledger_.position)));
  copy_rows(out->kv.data());
  for (const Tensor& cache : layout_.caches)
    out->kv_rows.push_back(layout_.rows(cache, ledger_.position));
  out->tokens = tokens_, out->pending = pending_, out->rng = rng_;
  out->messages = messages_, out->extra = extra_;
  return out;
}

void Session::restore(const Snapshot& snapshot) {
  if (snapshot.model != bundle().model_identity)
    throw Fault{EDGE_ERROR_STATE, "belongs to another model", "", "snapshot"};
  check_room(snapshot.position);
  if (snapshot.rows > sizes_.window)
    throw Fault{
        EDGE_ERROR_STATE,
        "has " + std::to_string(snapshot.rows) + " tokens pending, more than this session's window",
        "", "snapshot"};
  tokens_.reserve(snapshot.tokens.size());
  std::string messages = snapshot.messages, extra = snapshot.extra;  // nothing fails after this
  ledger_.make_room(snapshot.rows);
  Ledger after = ledger_.elsewhere(snapshot.position, snapshot.rows);
  const char* from = snapshot.state.data();
  for (const Tensor& tensor : layout_.recurrent) {
    std::memcpy(slot(tensor, after.source()), from, size_t(tensor.slot));
    from += tensor.slot;
  }
  from = snapshot.logs.data();
  for (const Tensor& log : layout_.logs)
    for (int i = 0; i < after.count(); i++, from += log.slot)
      std::memcpy(slot(log, after.pending()[i]), from, size_t(log.slot));
  after.first = layout_.first_needed(snapshot.position);
  from = snapshot.kv.data();
  for (size_t i = 0; i < layout_.caches.size(); i++) {
    const Tensor& cache = layout_.caches[i];
    take_rows(cache, from, snapshot.kv_rows[i], snapshot.position, after.first);
    from += cache.dims[1] * snapshot.kv_rows[i] * cache.row();
  }
  ledger_ = after;
  rows_ = 0;
  tokens_ = snapshot.tokens;
  pending_ = snapshot.pending, rng_ = snapshot.rng;
  messages_.swap(messages), extra_.swap(extra);
}

}  // namespace edge_lib
