// A robot's loop in C++: an answer with a deadline, a stop from another thread, a restored
// snapshot, and a state file that continues after a restart.
//
//   robot_loop BUNDLE STATE ID...
//
// g++ -std=c++17 robot_loop.cpp $(pkg-config --cflags --libs edge) -pthread -o robot_loop
#include <edge.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

// Throws the error that C reports.
void check(edge_status status, const edge_error& error) {
  if (!status) return;
  std::string where;
  for (const char* part : {error.file, error.field})  // either may be empty
    if (*part) where += std::string(part) + ": ";
  throw std::runtime_error(where + error.message);
}

template <class T, void (*End)(T*)>
struct Ends {
  void operator()(T* handle) const { End(handle); }
};
template <class T, void (*End)(T*)>
using Owned = std::unique_ptr<T, Ends<T, End>>;
using Bundle = Owned<edge_bundle, edge_bundle_close>;
using Model = Owned<edge_model, edge_model_close>;
using Session = Owned<edge_session, edge_session_free>;
using Snapshot = Owned<edge_snapshot, edge_snapshot_free>;

// Calls `make(&handle, &error)` and returns the handle in its owner.
template <class Owner, class Make>
Owner made(Make make) {
  typename Owner::pointer handle = nullptr;
  edge_error error;
  check(make(&handle, &error), error);
  return Owner(handle);
}

std::vector<int32_t> say(edge_session* session, const std::vector<int32_t>& prompt,
                         double seconds) {
  std::vector<int32_t> answer;
  edge_generation how = EDGE_GENERATION;
  how.max_tokens = 32;
  how.deadline_s = seconds;
  how.user = &answer;
  how.on_token = [](void* user, int32_t token) {
    static_cast<std::vector<int32_t>*>(user)->push_back(token);
    return 0;
  };
  edge_error error;
  check(edge_generate(session, prompt.data(), prompt.size(), &how, nullptr, &error), error);
  return answer;
}

}  // namespace

int main(int count, char** words) try {
  if (count < 4) return std::fprintf(stderr, "usage: robot_loop BUNDLE STATE ID...\n"), 2;
  std::vector<int32_t> prompt;
  for (int i = 3; i < count; i++) prompt.push_back(std::atoi(words[i]));
  auto bundle =
      made<Bundle>([&](auto out, auto error) { return edge_bundle_open(words[1], out, error); });
  auto model = made<Model>(
      [&](auto out, auto error) { return edge_model_load(bundle.get(), nullptr, out, error); });
  auto session = made<Session>(
      [&](auto out, auto error) { return edge_session_new(model.get(), nullptr, out, error); });
  edge_error error;
  check(edge_session_prepare(session.get(), &error), error);  // from here on nothing is allocated

  auto before = made<Snapshot>(
      [&](auto out, auto fault) { return edge_session_snapshot(session.get(), out, fault); });
  std::printf("%zu tokens within a second\n", say(session.get(), prompt, 1.0).size());
  check(edge_session_restore(session.get(), before.get(), &error),
        error);  // as if nothing had been said

  std::thread stop([&] { edge_session_cancel(session.get()); });  // an emergency stop
  stop.join();
  std::printf("%zu tokens after a stop\n", say(session.get(), prompt, 1.0).size());

  say(session.get(), prompt, 1.0);
  check(edge_session_save(session.get(), words[2], &error), error);
  check(edge_session_load(session.get(), words[2], &error),
        error);  // after a restart: nothing is run again
  std::printf("continues after %lld tokens\n", (long long)edge_session_position(session.get()));
} catch (const std::exception& problem) {
  return std::fprintf(stderr, "%s\n", problem.what()), 1;
}
