#include "kernels/cuda/softmax_rows.cuh"
template rafter::Status rafter::cuda::launch_softmax<rafter::DType::bf16>(
    const ScoreProblem&, const ScoreWave&, const LseTarget&, int, bool, std::int64_t, void*);
