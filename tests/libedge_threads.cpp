// Checks what edge.h promises to threads, in a build with ThreadSanitizer: sessions of one model on
// separate threads, sessions created meanwhile, cancellation from another thread, two threads on
// one session, and a callback that throws.
//
//   libedge_threads BUNDLE
#include <edge.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

void must(bool good, const char* what) {
  if (!good) std::fprintf(stderr, "%s\n", what), std::exit(1);
}

edge_session* begun(const edge_model* model) {
  edge_session* session = nullptr;
  edge_error error;
  must(!edge_session_new(model, nullptr, &session, &error), "a session");
  return session;
}

std::vector<int32_t> said(edge_session* session, int64_t most) {
  std::vector<int32_t> out;
  const int32_t prompt[] = {1, 2, 3};
  edge_sampling greedy = EDGE_SAMPLING;
  edge_generation how = EDGE_GENERATION;
  greedy.temperature = 0;
  how.sampling = &greedy, how.max_tokens = most, how.ignore_eos = 1, how.user = &out;
  how.on_token = [](void* user, int32_t token) {
    static_cast<std::vector<int32_t>*>(user)->push_back(token);
    return 0;
  };
  edge_error error;
  must(!edge_generate(session, prompt, 3, &how, nullptr, &error), "an answer");
  return out;
}

}  // namespace

int main(int count, char** words) {
  edge_error error;
  edge_bundle* bundle = nullptr;
  edge_model* model = nullptr;
  edge_model_options options = EDGE_MODEL_OPTIONS;
  options.threads = 2;
  if (count != 2 || edge_bundle_open(words[1], &bundle, &error) ||
      edge_model_load(bundle, &options, &model, &error))
    return std::fprintf(stderr, "%s\n", error.message), 1;

  edge_session* session = begun(model);
  const std::vector<int32_t> expected = said(session, 24);
  std::atomic<int> running{3};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; i++)
    threads.emplace_back([&] {
      edge_session* own = begun(model);
      must(!edge_session_prepare(own, nullptr), "prepared while others run");
      must(said(own, 24) == expected, "each session generates the same as alone");
      edge_session_free(own);
      running--;
    });
  while (running) edge_session_free(begun(model));
  for (auto& thread : threads) thread.join();

  // cancelled from another thread, which also tries to run it
  std::atomic<bool> over{false};
  std::thread other([&] {
    const int32_t token = 1;
    while (!over) {
      edge_status status = edge_session_run(session, &token, 1, nullptr, 0, nullptr, nullptr);
      must(status == EDGE_OK || status == EDGE_ERROR_ENGINE, "one of two threads is refused");
      edge_session_cancel(session);
    }
  });
  edge_generation how = EDGE_GENERATION;
  edge_result result = EDGE_RESULT;
  how.max_tokens = INT64_MAX, how.ignore_eos = 1;
  const int32_t token = 1;
  while (edge_generate(session, &token, 1, &how, &result, &error)) {
    must(error.status == EDGE_ERROR_ENGINE, "refused while the other thread runs");
  }
  must(result.finish == EDGE_FINISH_CANCELLED, "it was cancelled");
  over = true;
  other.join();

  must(!edge_session_clear(session, &error), "clear");
  how.max_tokens = 1;
  must(!edge_generate(session, &token, 1, &how, &result, &error), "a late cancel must not fail");
  must(!edge_session_clear(session, &error), "clear");
  how.on_token = [](void*, int32_t) -> int { throw 5; };
  must(edge_generate(session, &token, 1, &how, &result, &error) == EDGE_ERROR_ENGINE,
       "a callback's exception is reported");
  size_t run = 0;
  edge_session_tokens(session, &run);
  must(edge_session_position(session) == 1 && run == 1, "and the session is consistent");
  edge_session_free(session);
  edge_model_close(model);
  edge_bundle_close(bundle);
  std::printf("as promised\n");
}
