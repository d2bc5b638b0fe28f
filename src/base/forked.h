// Whether this process was made by fork().
#pragma once

namespace rafter::base {

/// True in a child made by fork() since the library was loaded, until it calls exec. An OpenMP pool
/// that the forking thread had is gone there, and libgomp waits for it forever; a new thread gets a
/// new pool.
bool is_forked_child();

}  // namespace rafter::base
