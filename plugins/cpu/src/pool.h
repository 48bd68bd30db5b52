// Threads that share a kernel's work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace edge_cpu {

// The caller works too. Pieces are claimed one by one, so that a preempted thread delays only the
// piece it has begun. Idle threads spin for a moment, then sleep.
class Pool {
 public:
  // `finest`: split all work into small pieces, for tests. `pin`: keep worker i on the i-th CPU of
  // the caller's set, which must have `threads` CPUs; 0 is left to the caller. Throws
  // std::system_error if the system cannot start the threads, or pin them.
  explicit Pool(int threads, bool finest = false, bool pin = false);
  ~Pool();
  Pool(const Pool&) = delete;

  int threads() const { return (int)workers_.size() + 1; }

  bool tiles = false;  // whether the running kernel may use AMX tiles

  // Calls work(first, last) over 0 ... count, in pieces of at least `grain`; returns when all are
  // done. Throws std::bad_alloc if a piece found no memory.
  template <class F> void each(int64_t count, int64_t grain, F work) {
    if (count <= 0) return;
    if (!finest_ && (workers_.empty() || count <= grain)) return work(int64_t(0), count);
    share(count, grain, [](void* f, int64_t a, int64_t b) { (*static_cast<F*>(f))(a, b); }, &work);
  }

  // Gives every thread as much of `thread_bytes` as the one with the most has: a thread that got no
  // piece of a job so far needs none later. Throws std::bad_alloc.
  void level();

  // Uninitialised memory of the running kernel, in slots 0 to 5. Only grows.
  template <class T> T* scratch(int slot, int64_t count) {
    return static_cast<T*>(bytes(slot, count * int64_t(sizeof(T))));
  }

 private:
  void* bytes(int slot, int64_t count);
  using Work = void (*)(void*, int64_t, int64_t);
  void share(int64_t count, int64_t grain, Work work, void* context);
  void post(int64_t count, int64_t size, Work work, void* context);
  bool claim(uint64_t job);
  void start(int threads, bool pin);
  void serve();
  void end();

  std::vector<std::thread> workers_;
  struct Scratch;
  Scratch* scratch_;
  const bool finest_;
  // the job: its number is in the upper half of next_, so that threads late from the last job
  // claim none of its pieces
  std::atomic<Work> work_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int64_t> count_{0}, size_{0};
  alignas(64) std::atomic<uint64_t> next_{0};
  alignas(64) std::atomic<int64_t> left_{0};
  alignas(64) std::atomic<uint64_t> job_{0};
  std::atomic<bool> stop_{false}, failed_{false};
  std::atomic<int> asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Returns the number of CPUs that this thread may use, or 0 if threads cannot be pinned here.
int pinnable();

// Uninitialised memory of this thread, aligned to 64 bytes, in slots 0 and 1. Only grows.
void* thread_bytes(int slot, int64_t count);

}  // namespace edge_cpu
