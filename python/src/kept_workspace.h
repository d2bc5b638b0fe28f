// Workspace that stays with a CUDA stream from call to call: allocating it anew takes longer than
// reading the call's arguments.
#pragma once

#include <cstdint>

#include "arrays.h"

namespace rafter::python {

/// The memory that the stream of a place keeps, taken for the time in which a call queues its work:
/// what is queued there later waits for that work. Has no data where more bytes are asked for than
/// are kept, another thread has taken it, a graph is being captured (it must own what it works on),
/// or many streams keep some already. The interpreter is locked when one is made or destroyed.
class KeptWorkspace {
 public:
  KeptWorkspace(const Place& place, std::int64_t bytes);
  ~KeptWorkspace();
  KeptWorkspace(const KeptWorkspace&) = delete;
  KeptWorkspace& operator=(const KeptWorkspace&) = delete;
  void* data() const;

 private:
  struct Entry;
  static Entry* take(const Place& place);
  Entry* entry_ = nullptr;
};

}  // namespace rafter::python
