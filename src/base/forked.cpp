#include "base/forked.h"

#include <pthread.h>

#include <atomic>

namespace rafter::base {
namespace {

std::atomic<bool> forked = false;

// At load: others may have started the pool, and forked, before the first call of ours.
[[gnu::constructor]] void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
}

}  // namespace

bool is_forked_child() { return forked.load(std::memory_order_relaxed); }

}  // namespace rafter::base
