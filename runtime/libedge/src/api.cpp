// The C interface. No exception leaves it.
#include <cxxabi.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>

#include "choices.h"
#include "decoder.h"
#include "session.h"

using namespace edge_lib;

struct edge_bundle {
  std::shared_ptr<const OpenBundle> opened;
};
struct edge_model {
  std::shared_ptr<Engine> engine;
};
struct edge_session {
  std::unique_ptr<Session> own;
};
struct edge_decoder {
  Decoder own;
};
struct edge_choices {
  Choices own;
};
struct edge_snapshot {
  std::unique_ptr<Snapshot> own;
};

namespace {

// Allocates nothing, because it also reports that memory ran out.
edge_status fail(edge_error* error, edge_status status, std::string_view message,
                 std::string_view file = "", std::string_view field = "") {
  if (error) {
    error->status = status;
    print(error->message, sizeof error->message, message);
    print(error->file, sizeof error->file, file);
    print(error->field, sizeof error->field, field);
  }
  return status;
}

template <class F>
edge_status guarded(edge_error* error, F work) {
  try {
    work();
    if (error) *error = {};
    return EDGE_OK;
  } catch (const Fault& fault) {
    return fail(error, fault.status, fault.message, fault.file, fault.field);
  } catch (const std::bad_alloc&) {
    return fail(error, EDGE_ERROR_MEMORY, "not enough memory");
  } catch (const std::exception& problem) {
    return fail(error, EDGE_ERROR_ENGINE, problem.what());
#ifdef __GLIBCXX__
  } catch (const abi::__forced_unwind&) {
    throw;  // the thread is being cancelled, which is not an error
#endif
  } catch (...) {  // thrown by a callback
    return fail(error, EDGE_ERROR_ENGINE, "the callback threw an exception");
  }
}

template <class T>
T& given(T* pointer, const char* name) {
  if (!pointer) throw Fault{EDGE_ERROR_INPUT, "is NULL", "", name};
  return *pointer;
}

// Structures grow at their end, so a program compiled with an older header passes fewer fields.
template <class T>
void check_size(const T* value, const char* name) {
  if (value->size < sizeof value->size || value->size > sizeof(T))
    throw Fault{EDGE_ERROR_INPUT,
                "has a size that this version does not know: initialize it with its macro", "",
                name};
}
template <class T>
T taken(const T* options, T usual, const char* name) {
  if (!options) return usual;
  check_size(options, name);
  std::memcpy(&usual, options, options->size);
  usual.size = sizeof(T);
  return usual;
}
template <class T>
void give(T* target, T found, const char* name) {
  check_size(&given(target, name), name);
  found.size = target->size;
  std::memcpy(target, &found, target->size);
}

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

// Text

edge_status edge_bundle_prompt(const edge_bundle* bundle, const edge_part* parts, size_t part_count,
                               int32_t* tokens, size_t capacity, size_t* count, edge_error* error) {
  return guarded(error, [&] {
    const Tokenizer& tokenizer = given(bundle, "bundle").opened->tokenizer();
    given(count, "count");
    for (size_t i = 0; i < part_count; i++)
      if (!given(parts, "parts").text && parts[i].bytes) given(parts[i].text, "text");
    std::vector<int32_t> ids = tokenizer.encode(parts, part_count);
    *count = ids.size();
    if (ids.empty() || ids.size() > capacity) return;
    std::copy(ids.begin(), ids.end(), &given(tokens, "tokens"));
  });
}

edge_status edge_bundle_encode(const edge_bundle* bundle, const char* text, size_t bytes,
                               int32_t* tokens, size_t capacity, size_t* count, edge_error* error) {
  edge_part whole = {text, bytes, 0};
  return edge_bundle_prompt(bundle, &whole, 1, tokens, capacity, count, error);
}

edge_status edge_bundle_token(const edge_bundle* bundle, const char* text, int32_t* token,
                              edge_error* error) {
  return guarded(error, [&] {
    int32_t found = given(bundle, "bundle").opened->tokenizer().special(&given(text, "text"));
    given(token, "token") = found;
    if (found < 0)
      throw Fault{EDGE_ERROR_INPUT, "is not a special token: " + brief(text), "", "text"};
  });
}

edge_status edge_bundle_decode(const edge_bundle* bundle, const int32_t* tokens, size_t count,
                               char* text, size_t capacity, size_t* bytes, edge_error* error) {
  return guarded(error, [&] {
    const Tokenizer& tokenizer = given(bundle, "bundle").opened->tokenizer();
    if (count) given(tokens, "tokens");
    size_t total = 0;
    for (size_t i = 0; i < count; i++) total += tokenizer.bytes(tokens[i]).size();
    given(bytes, "bytes") = total;
    if (!total || total > capacity) return;
    given(text, "text");
    for (size_t i = 0; i < count; i++) {
      const std::string& each = tokenizer.bytes(tokens[i]);
      text = std::copy(each.begin(), each.end(), text);
    }
  });
}

edge_status edge_decoder_new(const edge_bundle* bundle, const edge_decoder_options* options,
                             edge_decoder** decoder, edge_error* error) {
  return guarded(error, [&] {
    given(decoder, "decoder") = nullptr;
    edge_decoder_options asked = taken(options, EDGE_DECODER_OPTIONS, "options");
    *decoder = new edge_decoder{Decoder(given(bundle, "bundle").opened, asked)};
  });
}

void edge_decoder_free(edge_decoder* decoder) { delete decoder; }

edge_status edge_decoder_feed(edge_decoder* decoder, int32_t token, const char** text,
                              size_t* bytes, int32_t* stopped, edge_error* error) {
  return guarded(error, [&] {
    std::string_view found = given(decoder, "decoder").own.feed(token);
    if (text) *text = found.data();
    if (bytes) *bytes = found.size();
    if (stopped) *stopped = decoder->own.stopped();
  });
}

edge_status edge_decoder_finish(edge_decoder* decoder, const char** text, size_t* bytes,
                                edge_error* error) {
  return guarded(error, [&] {
    std::string_view found = given(decoder, "decoder").own.finish();
    if (text) *text = found.data();
    if (bytes) *bytes = found.size();
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

edge_status edge_choices_new(const edge_bundle* bundle, const char* const* texts, size_t count,
                             edge_choices** choices, edge_error* error) {
  return guarded(error, [&] {
    given(choices, "choices") = nullptr;
    *choices = new edge_choices{Choices(given(bundle, "bundle").opened, texts, count)};
  });
}

void edge_choices_free(edge_choices* choices) { delete choices; }

edge_status edge_choices_begin(edge_choices* choices, edge_constraint* constraint,
                               edge_error* error) {
  return guarded(error, [&] {
    Choices& own = given(choices, "choices").own;
    edge_constraint made = EDGE_CONSTRAINT;
    made.allow = [](void* user, uint32_t* mask, size_t words) {
      static_cast<Choices*>(user)->allow(mask, words);
      return 0;
    };
    // a program in C may call it too, and no exception may pass through its frames
    made.accept = [](void* user, int32_t token) {
      try {
        return static_cast<Choices*>(user)->accept(token) ? EDGE_CONSTRAINT_DONE : 0;
      } catch (const Fault&) {
        return -1;
      }
    };
    made.user = &own;
    give(constraint, made, "constraint");
    own.begin();
  });
}

int32_t edge_choices_found(const edge_choices* choices) {
  return choices ? choices->own.found() : -1;
}

void edge_session_cancel(edge_session* session) {
  if (session) session->own->cancel(true);
}

void edge_session_resume(edge_session* session) {
  if (session) session->own->cancel(false);
}
}
