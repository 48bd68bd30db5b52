// The C interface of bundles, models, sessions and generation.
#include <algorithm>
#include <chrono>

#include "api.h"
#include "session.h"

using namespace edge_lib;

struct edge_model {
  std::shared_ptr<Engine> engine;
};
struct edge_session {
  std::unique_ptr<Session> own;
};
struct edge_snapshot {
  std::unique_ptr<Snapshot> own;
};

namespace {

// Calls `work` with the session, unless another thread uses it.
template <class F>
edge_status with(edge_session* session, edge_error* error, F work) {
  return guarded(error, [&] {
    Session& own = *given(session, "session").own;
    Session::Hold hold(own);
    work(own);
  });
}

}  // namespace

extern "C" {

int32_t edge_api_version(void) { return EDGE_API_VERSION; }

// Bundles

edge_status edge_bundle_open(const char* folder, edge_bundle** bundle, edge_error* error) {
  return guarded(error, [&] {
    given(bundle, "bundle") = nullptr;
    given(folder, "folder");
    *bundle = new edge_bundle{std::make_shared<const OpenBundle>(folder)};
  });
}

void edge_bundle_close(edge_bundle* bundle) { delete bundle; }

edge_status edge_bundle_verify(const edge_bundle* bundle, edge_error* error) {
  return guarded(error, [&] { given(bundle, "bundle").opened->bundle.verify(); });
}

edge_status edge_bundle_info(const edge_bundle* bundle, edge_info* info, edge_error* error) {
  return guarded(error, [&] {
    const Bundle& own = given(bundle, "bundle").opened->bundle;
    edge_info out = EDGE_INFO;
    out.vocab_size = narrowed(own.config.vocab), out.token_count = narrowed(own.token_count);
    out.layers = int32_t(own.config.layers), out.chunk = int32_t(own.chunk);
    out.max_context = own.config.caches.empty() ? 0 : narrowed(own.config.max_context);
    out.bos = own.bos, out.add_bos = own.add_bos;
    out.eos_count = own.eos.size(), out.eos = own.eos.data();
    out.family = own.config.family.c_str(), out.quantization = own.recipe.c_str();
    out.tokenizer = own.tokenizer.c_str(), out.tokenizer_file = own.tokenizer_file.c_str();
    out.chat_template = own.chat_template.c_str(), out.fingerprint = own.fingerprint.c_str();
    give(info, out, "info");
  });
}

edge_status edge_bundle_read(const edge_bundle* bundle, const char* file, char* data,
                             size_t capacity, size_t* bytes, edge_error* error) {
  return guarded(error, [&] {
    const Bundle& own = given(bundle, "bundle").opened->bundle;
    std::string content = own.read(&given(file, "file"), MAX_FILE);
    given(bytes, "bytes") = content.size();
    if (content.empty() || content.size() > capacity) return;
    std::copy(content.begin(), content.end(), &given(data, "data"));
  });
}

edge_status edge_bundle_memory(const edge_bundle* bundle, const edge_session_options* options,
                               edge_memory* memory, edge_error* error) {
  return guarded(error, [&] {
    const OpenBundle& opened = *given(bundle, "bundle").opened;
    edge_session_options asked = taken(options, EDGE_SESSION_OPTIONS, "options");
    SessionSizes sizes = SessionSizes::of(opened.bundle, &asked);
    StateLayout layout(opened.bundle.config, opened.plan, sizes);
    RunLayouts runs(opened.bundle, opened.plan, sizes);
    WeightPlaces weights(opened.plan);
    edge_memory out = EDGE_MEMORY;
    out.weights = weights.total + weights.inlined.total;
    out.state = layout.block, out.kv_cache = layout.cache_block;
    out.logits = times(times(4, sizes.window), opened.bundle.config.vocab);
    out.workspace = plus(runs.values, runs.inputs);
    out.total =
        plus(plus(out.weights, out.state), plus(plus(out.kv_cache, out.logits), out.workspace));
    out.snapshot = plus(layout.slot_bytes, layout.cache_bytes);
    give(memory, out, "memory");
  });
}

edge_status edge_bundle_sampling(const edge_bundle* bundle, edge_sampling* sampling,
                                 edge_error* error) {
  return guarded(error, [&] {
    constexpr double MOST = INT32_MAX;  // limit of the integer fields; the others are far below
    edge_sampling out = EDGE_SAMPLING;
    const Json* own = given(bundle, "bundle").opened->bundle.manifest.find("generation");
    auto number = [&](const char* name, auto& field) {
      const Json* found = own ? own->find(name) : nullptr;
      if (found && !found->is(Json::null))
        field = std::remove_reference_t<decltype(field)>(std::min(found->number(), MOST));
    };
    number("temperature", out.temperature);
    number("top_k", out.top_k);
    number("top_p", out.top_p);
    number("min_p", out.min_p);
    number("repetition_penalty", out.repetition_penalty);
    give(sampling, out, "sampling");
  });
}

// Models

edge_status edge_model_load(const edge_bundle* bundle, const edge_model_options* options,
                            edge_model** model, edge_error* error) {
  return guarded(error, [&] {
    given(model, "model") = nullptr;
    edge_model_options asked = taken(options, EDGE_MODEL_OPTIONS, "options");
    *model = new edge_model{std::make_shared<Engine>(given(bundle, "bundle").opened, asked.threads,
                                                     asked.instruction_set, asked.pin != 0)};
  });
}

void edge_model_close(edge_model* model) { delete model; }

const char* edge_model_instruction_set(const edge_model* model) {
  return model ? model->engine->set().c_str() : "";
}

// Sessions

edge_status edge_session_new(const edge_model* model, const edge_session_options* options,
                             edge_session** session, edge_error* error) {
  return guarded(error, [&] {
    given(session, "session") = nullptr;
    const auto& engine = given(model, "model").engine;
    edge_session_options asked = taken(options, EDGE_SESSION_OPTIONS, "options");
    *session = new edge_session{
        std::make_unique<Session>(engine, SessionSizes::of(engine->bundle(), &asked))};
  });
}

void edge_session_free(edge_session* session) { delete session; }

edge_status edge_session_prepare(edge_session* session, edge_error* error) {
  return with(session, error, [](Session& own) { own.prepare(); });
}

edge_status edge_session_run(edge_session* session, const int32_t* tokens, size_t count,
                             const int32_t* parents, uint32_t flags, const float** logits,
                             edge_error* error) {
  return with(session, error, [&](Session& own) {
    if (logits) *logits = nullptr;
    const float* found = own.run(tokens, count, parents, flags);
    if (logits) *logits = found;
  });
}

edge_status edge_session_select(edge_session* session, int32_t node, edge_error* error) {
  return with(session, error, [&](Session& own) { own.select(node); });
}

edge_status edge_session_rewind(edge_session* session, size_t count, edge_error* error) {
  return with(session, error, [&](Session& own) { own.rewind(count); });
}

edge_status edge_session_clear(edge_session* session, edge_error* error) {
  return with(session, error, [](Session& own) { own.clear(); });
}

edge_status edge_session_fork(edge_session* session, edge_session** copy, edge_error* error) {
  if (copy) *copy = nullptr;  // also where the session is busy
  return with(session, error, [&](Session& own) {
    given(copy, "copy");
    *copy = new edge_session{own.fork()};
  });
}

int64_t edge_session_position(const edge_session* session) {
  return session ? session->own->position() : 0;
}
int64_t edge_session_reach(const edge_session* session) {
  return session ? session->own->reach() : 0;
}

const int32_t* edge_session_tokens(const edge_session* session, size_t* count) {
  if (count) *count = session ? session->own->tokens().size() : 0;
  return session ? session->own->tokens().data() : nullptr;
}

int32_t edge_session_pending(const edge_session* session) {
  return session ? session->own->pending() : -1;
}

edge_status edge_session_snapshot(edge_session* session, edge_snapshot** snapshot,
                                  edge_error* error) {
  if (snapshot) *snapshot = nullptr;  // also where the session is busy
  return with(session, error, [&](Session& own) {
    given(snapshot, "snapshot");
    *snapshot = new edge_snapshot{own.snapshot()};
  });
}

edge_status edge_session_restore(edge_session* session, const edge_snapshot* snapshot,
                                 edge_error* error) {
  return with(session, error, [&](Session& own) { own.restore(*given(snapshot, "snapshot").own); });
}

int64_t edge_snapshot_bytes(const edge_snapshot* snapshot) {
  return snapshot ? snapshot->own->bytes() : 0;
}
void edge_snapshot_free(edge_snapshot* snapshot) { delete snapshot; }

edge_status edge_session_save(edge_session* session, const char* path, edge_error* error) {
  return with(session, error, [&](Session& own) { own.save(&given(path, "path")); });
}

edge_status edge_session_load(edge_session* session, const char* path, edge_error* error) {
  return with(session, error, [&](Session& own) { own.load(&given(path, "path")); });
}

// Generation

edge_status edge_session_sample(edge_session* session, const edge_sampling* sampling,
                                int32_t* token, edge_error* error) {
  return with(session, error, [&](Session& own) {
    edge_sampling how = taken(sampling, EDGE_SAMPLING, "sampling");
    check_sampling(how, own.bundle().config.vocab);
    given(token, "token") = own.sample(how, own.recent_from(how));
  });
}

edge_status edge_generate(edge_session* session, const int32_t* prompt, size_t count,
                          const edge_generation* options, edge_result* result, edge_error* error) {
  edge_result made = EDGE_RESULT;
  auto began = std::chrono::steady_clock::now();
  edge_status status = with(session, error, [&](Session& own) {
    if (result) check_size(result, "result");
    edge_generation how = taken(options, EDGE_GENERATION, "options");
    if (how.constraint) check_size(how.constraint, "constraint");
    made.finish =
        own.generate(prompt, count, how, taken(how.sampling, EDGE_SAMPLING, "sampling"), made);
  });
  if (result && result->size >= sizeof result->size && result->size <= sizeof made) {
    made.size = result->size;
    made.total_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    std::memcpy(result, &made, made.size);
  }
  return status;
}

void edge_session_cancel(edge_session* session) {
  if (session) session->own->cancel(true);
}

void edge_session_resume(edge_session* session) {
  if (session) session->own->cancel(false);
}
}
