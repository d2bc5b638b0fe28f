/* What causal attention over 4096 tokens would cost on a GPU that need not be here. */
#include <rafter/rafter.h>
#include <stdio.h>

int main(void) {
  const rafter_problem problem = {.size = sizeof problem,
                                  .batch = 1,
                                  .heads_q = 32,
                                  .heads_kv = 8,
                                  .seqlen_q = 4096,
                                  .seqlen_kv = 4096,
                                  .head_dim = 128,
                                  .dtype = RAFTER_BF16,
                                  .mask = RAFTER_MASK_CAUSAL};
  rafter_cost cost = {.size = sizeof cost};
  if (rafter_explain(&problem, RAFTER_FUSED, "h100-sxm", &cost) != RAFTER_OK) {
    fprintf(stderr, "%s\n", rafter_error_message());
    return 1;
  }
  printf("rafter %s: %.3g FLOP, %.3g B, %.3g s\n", rafter_version(), cost.flops, cost.bytes,
         cost.time_s);
  return cost.wall == RAFTER_WALL_COMPUTE ? 0 : 1;
}
