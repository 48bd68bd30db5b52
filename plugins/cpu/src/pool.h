// Threads that share a kernel's work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace edge_cpu {

// The caller works too. Parts are claimed one by one, so that a thread which the system does not run
// holds up nothing but the part it has begun. Idle threads wait awake for a moment, then sleep.
class Pool {
 public:
  // `finest`: share all work in small pieces, whatever it is worth: for tests. Throws
  // std::system_error where the system gives fewer threads.
  explicit Pool(int threads, bool finest = false);
  ~Pool();
  Pool(const Pool&) = delete;

  int threads() const { return (int)workers_.size() + 1; }

  bool tiles = false;  // whether the running kernel may use the tiles of AMX

  // work(first, last) over 0 ... count, in pieces of at least `grain`; returns when all is done.
  // Throws std::bad_alloc where a piece found no memory.
  template <class F> void each(int64_t count, int64_t grain, F work) {
    if (count <= 0) return;
    if (!finest_ && (workers_.empty() || count <= grain)) return work(int64_t(0), count);
    share(count, grain, [](void* f, int64_t a, int64_t b) { (*static_cast<F*>(f))(a, b); }, &work);
  }

  // Memory of the kernel that runs, uninitialised; `slot`, 0 to 4, tells several apart. Only grows.
  template <class T> T* scratch(int slot, int64_t count) {
    return static_cast<T*>(bytes(slot, count * int64_t(sizeof(T))));
  }

 private:
  void* bytes(int slot, int64_t count);
  using Work = void (*)(void*, int64_t, int64_t);
  void share(int64_t count, int64_t grain, Work work, void* context);
  bool claim(uint64_t job);
  void serve();
  void end();

  std::vector<std::thread> workers_;
  struct Scratch;
  Scratch* scratch_;
  const bool finest_;
  // the job: its number is in the upper half of next_, so that a late thread claims nothing of it
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

// Memory of this thread, uninitialised, on 64 bytes; `slot`, 0 or 1, tells two apart. Only grows.
void* thread_bytes(int slot, int64_t count);

}  // namespace edge_cpu
