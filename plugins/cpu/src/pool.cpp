#include "pool.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <system_error>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace edge_cpu {

namespace {

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr auto AWAKE = std::chrono::microseconds(200);
constexpr int PIECES = 4;   // pieces per thread
constexpr int FINEST = 64;  // pieces per job if `finest`

// Memory that only grows, aligned to 64 bytes.
struct Room {
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines;
  void* of(int64_t count) {
    grow(size_t(count) / 64 + 2);
    return lines.data();
  }
  void grow(size_t wanted) {
    if (lines.size() >= wanted) return;
    lines = {};  // nothing is kept, so not `resize`, which copies and may reserve twice as much
    lines = std::vector<Line>(wanted);
  }
};

constexpr int LOCAL = 2;

// The rooms of `thread_bytes`.
Room* local_rooms() {
  static thread_local Room rooms[LOCAL];
  return rooms;
}

// What the threads of `Pool::level` share.
struct Meeting {
  explicit Meeting(int threads) : absent(threads) {}
  std::atomic<int> absent;
  std::atomic<size_t> most[LOCAL] = {};

  void attend() {
    Room* rooms = local_rooms();
    for (int i = 0; i < LOCAL; i++) {
      size_t own = rooms[i].lines.size(), known = most[i].load();
      while (known < own && !most[i].compare_exchange_weak(known, own)) {
      }
    }
    absent.fetch_sub(1);
    while (absent.load() > 0) std::this_thread::yield();
    for (int i = 0; i < LOCAL; i++) rooms[i].grow(most[i].load());
  }
};

}  // namespace

struct Pool::Scratch {
  Room rooms[6];
};

void* Pool::bytes(int slot, int64_t count) { return scratch_->rooms[slot].of(count); }

void* thread_bytes(int slot, int64_t count) { return local_rooms()[slot].of(count); }

// A piece a thread: nobody leaves the meeting, and so claims another piece, before all have come.
void Pool::level() {
  Meeting meeting(threads());
  auto attend = [](void* at, int64_t, int64_t) { static_cast<Meeting*>(at)->attend(); };
  post(threads(), 1, attend, &meeting);
}

namespace {

// The CPUs that this thread may use; none if they cannot be told.
std::vector<int> usable() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int i = 0; i < CPU_SETSIZE; i++)
      if (CPU_ISSET(i, &set)) cpus.push_back(i);
#endif
  return cpus;
}

void keep_on(std::thread& thread, int cpu) {
  int fault = ENOSYS;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  fault = pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
#endif
  if (fault) throw std::system_error(fault, std::generic_category());
}

}  // namespace

int pinnable() { return int(usable().size()); }

Pool::Pool(int threads, bool finest, bool pin) : scratch_(new Scratch), finest_(finest) {
  try {
    start(threads, pin);
  } catch (...) {
    end();
    throw;
  }
}

void Pool::start(int threads, bool pin) {
  std::vector<int> cpus;
  if (pin) cpus = usable();
  if (pin && int(cpus.size()) < threads) throw std::system_error(EINVAL, std::generic_category());
  for (int i = 1; i < threads; i++) {
    workers_.emplace_back([this] { serve(); });
    if (pin) keep_on(workers_.back(), cpus[size_t(i)]);
  }
}

Pool::~Pool() { end(); }

void Pool::end() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
  delete scratch_;
}

// Claims one piece of the job and runs it. Returns false when none is left.
bool Pool::claim(uint64_t job) {
  uint64_t next = next_.load(std::memory_order_acquire);
  for (;;) {
    // these values belong to the job only if the claim below succeeds
    if (next >> 32 != (job & 0xffffffff)) return false;
    int64_t count = count_.load(std::memory_order_relaxed);
    int64_t size = size_.load(std::memory_order_relaxed);
    Work work = work_.load(std::memory_order_relaxed);
    void* context = context_.load(std::memory_order_relaxed);
    int64_t first = int64_t(next & 0xffffffff) * size;
    if (first >= count) return false;
    if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
    try {
      work(context, first, std::min(first + size, count));
    } catch (...) {  // no memory; `share` reports it
      failed_.store(true, std::memory_order_relaxed);
    }
    left_.fetch_sub(1, std::memory_order_acq_rel);
    return true;
  }
}

void Pool::share(int64_t count, int64_t grain, Work work, void* context) {
  if (finest_) grain = 1;
  int64_t most = finest_ ? FINEST : threads() * PIECES;
  int64_t pieces = std::min<int64_t>(most, (count + grain - 1) / grain);
  int64_t size = (count + pieces - 1) / pieces;
  if (size > grain) size = (size + grain - 1) / grain * grain;  // two pieces of 4, not 7 and 1
  post(count, size, work, context);
}

// Runs the job in pieces of `size`.
void Pool::post(int64_t count, int64_t size, Work work, void* context) {
  int64_t pieces = (count + size - 1) / size;
  uint64_t job = job_.load(std::memory_order_relaxed) + 1;
  // nothing can be claimed while the job changes: this piece is beyond the end of every job
  next_.store((((job - 1) & 0xffffffff) << 32) | 0xffffffff, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  work_.store(work, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  count_.store(count, std::memory_order_relaxed);
  size_.store(size, std::memory_order_relaxed);
  left_.store(pieces, std::memory_order_relaxed);
  next_.store((job & 0xffffffff) << 32, std::memory_order_release);
  job_.store(job, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  while (claim(job)) {
  }
  for (int spins = 0; left_.load(std::memory_order_acquire) > 0; spins++) {
    if (spins < 2000)
      pause();
    else
      std::this_thread::yield();
  }
  if (failed_.exchange(false)) throw std::bad_alloc();
}

void Pool::serve() {
  uint64_t seen = 0;
  for (;;) {
    auto until = std::chrono::steady_clock::now() + AWAKE;
    for (int spins = 1; job_.load(std::memory_order_acquire) == seen; spins++) {
      if (stop_.load(std::memory_order_relaxed)) return;
      pause();
      if (spins % 64 == 0 && std::chrono::steady_clock::now() > until) {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return stop_.load() || job_.load() != seen; });
        asleep_.fetch_sub(1, std::memory_order_seq_cst);
      }
    }
    seen = job_.load(std::memory_order_acquire);
    while (claim(seen)) {
    }
  }
}

}  // namespace edge_cpu
