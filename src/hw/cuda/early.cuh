// What a kernel that is launched by launch_early() says of the grids around it.
#pragma once

namespace rafter::cuda {

/// Waits until the grids before this one on the stream are done and their memory is seen. Every
/// thread calls it before it reads or writes what they do; in a kernel launched by launch() it is
/// at once. PTX ISA: griddepcontrol.wait.
__device__ inline void wait_for_earlier_grids() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// The next grid of the stream, if launched early, may begin once every CTA of this one has said so
/// or ended. PTX ISA: griddepcontrol.launch_dependents.
__device__ inline void let_next_grid_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace rafter::cuda
