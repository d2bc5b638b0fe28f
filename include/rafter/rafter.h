/* Rafter from C: describe a problem, plan it once, run it as often as wanted.
 *
 * What grows carries its size: set `size` to sizeof of the struct and leave what you do not mean at
 * zero, which is every field's default. A program compiled against an older header runs with a
 * newer library; a newer program is refused by an older library only where it uses a field that the
 * library does not know. rafter_tensor, rafter_lse, rafter_indices, rafter_bits,
 * rafter_counts and rafter_state never change.
 *
 * Functions return a status; rafter_error_message() says in one line what was wrong. Nothing
 * throws, prints or exits. A plan may be used by several threads at once. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors */

typedef int32_t rafter_status;
enum {
  RAFTER_OK = 0,
  RAFTER_INVALID_ARGUMENT = 1, /* something impossible was given; the parameter is named */
  RAFTER_UNSUPPORTED = 2,      /* possible, but no kernel of this build or machine does it */
  RAFTER_DEVICE_ERROR = 3,     /* the device or the operating system failed, memory included */
  RAFTER_IO_ERROR = 4          /* a file could not be read, or its contents are malformed */
};

/* "ok", "invalid argument", "unsupported", "device error", "i/o error"; "unknown" for any other. */
const char* rafter_status_name(rafter_status status);
/* Of the last call on this thread that failed, until the next one fails: one line, such as
 * "head_dim: 300 given; 1 to 256 allowed", and the parameter alone, "head_dim". "" before that. */
const char* rafter_error_message(void);
const char* rafter_error_parameter(void);
/* "0.1.0" */
const char* rafter_version(void);

/* ---- tensors */

typedef int32_t rafter_dtype;
enum {
  RAFTER_F32 = 1,
  RAFTER_F16,
  RAFTER_BF16,
  RAFTER_E4M3,
  RAFTER_E5M2,
  RAFTER_INT8,
  RAFTER_INT4,
  RAFTER_I32,
  RAFTER_I64
};

/* [batch, seqlen, heads, head_dim], head_dim contiguous unless a kernel says that it takes more.
 * A packed tensor [total, heads, head_dim] has batch 1 and seqlen total; a paged cache
 * [pages, page_size, heads_kv, head_dim] has batch pages and seqlen page_size. */
typedef struct rafter_tensor {
  void* data;
  int64_t shape[4];
  int64_t stride[4]; /* in elements */
  rafter_dtype dtype;
  int32_t reserved; /* 0 */
} rafter_tensor;

/* f32, natural logarithm: [batch, heads_q, seqlen_q]; packed [1, heads_q, total_q]. A null data
 * asks for no lse. */
typedef struct rafter_lse {
  float* data;
  int64_t shape[3];
  int64_t stride[3]; /* in elements */
} rafter_lse;

/* Lengths, offsets (one row) or a page table [batch, pages per sequence], contiguous, i32 or i64. A
 * null data: not given. */
typedef struct rafter_indices {
  const void* data;
  int64_t rows, cols; /* rows is 1 save for a page table */
  rafter_dtype dtype;
  int32_t reserved; /* 0 */
} rafter_indices;

/* Words [rows, cols], the words of a row contiguous. A null data: not given. */
typedef struct rafter_bits {
  const uint64_t* data;
  int64_t rows, cols;
  int64_t row_stride; /* in words */
} rafter_bits;

/* Counts that a run writes. A null data: not wanted. */
typedef struct rafter_counts {
  int32_t* data;
  int64_t count;
} rafter_counts;

/* Views of contiguous memory. */
rafter_tensor rafter_contiguous(const void* data, rafter_dtype dtype, int64_t batch, int64_t seqlen,
                                int64_t heads, int64_t head_dim);
rafter_lse rafter_contiguous_lse(float* data, int64_t batch, int64_t heads, int64_t seqlen);

/* ---- what is asked for */

typedef int32_t rafter_mask;
enum {
  RAFTER_MASK_NONE = 0,
  RAFTER_MASK_CAUSAL = 1,
  RAFTER_MASK_WINDOW = 2 /* keys from i + offset - window_left to i + offset + window_right */
};
typedef int32_t rafter_mask_align;
enum {
  RAFTER_BOTTOM_RIGHT = 0, /* offset = seqlen_kv - seqlen_q: the last row sees the last key */
  RAFTER_TOP_LEFT = 1      /* offset = 0 */
};
typedef int32_t rafter_layout;
enum {
  RAFTER_DENSE = 0,
  RAFTER_PACKED = 1, /* [total, heads, head_dim] with cu_seqlens_q and cu_seqlens_kv */
  RAFTER_PAGED = 2   /* q dense; k, v [pages, page_size, heads_kv, head_dim] with a page table */
};
typedef int32_t rafter_pipeline;
enum { RAFTER_PIPELINE_ANY = 0, RAFTER_UNFUSED, RAFTER_HALF_FUSED, RAFTER_FUSED, RAFTER_SPLIT_KV };
typedef int32_t rafter_device;
enum { RAFTER_CPU = 0, RAFTER_CUDA = 1 };
typedef int32_t rafter_pass;
enum { RAFTER_PASS_FORWARD = 0, RAFTER_PASS_BACKWARD = 1 };
typedef int32_t rafter_wall;
enum { RAFTER_WALL_COMPUTE = 1, RAFTER_WALL_BANDWIDTH, RAFTER_WALL_DISPATCH };

/* Lengths are capacities where the layout has lengths as data. */
typedef struct rafter_problem {
  size_t size;   /* sizeof(rafter_problem) */
  int64_t batch; /* 0: an empty batch, which runs at once */
  int64_t heads_q;
  int64_t heads_kv; /* must divide heads_q; 0: heads_q */
  int64_t seqlen_q, seqlen_kv;
  int64_t head_dim;   /* 1 to 256 */
  int64_t head_dim_v; /* 0: head_dim */
  rafter_dtype dtype; /* of q, and of k, v; o is of this dtype or f32 */
  rafter_layout layout;
  rafter_mask mask;
  rafter_mask_align mask_align;
  int64_t window_left, window_right; /* of RAFTER_MASK_WINDOW; -1: unbounded */
  float softmax_scale;               /* natural; default 1 / sqrt(head_dim) */
  int32_t has_softmax_scale;         /* 1: softmax_scale is meant, also when it is 0 */
  float softcap;                /* 0: off; else scores become softcap * tanh(score / softcap) */
  int32_t seqused_kv;           /* 1: the keys of each sequence are counted at run time */
  int64_t total_q, total_kv;    /* packed: rows of q and o, of k and v */
  int64_t page_size, num_pages; /* paged */
  rafter_dtype kv_dtype;        /* of k, v: dtype, which 0 means, or RAFTER_INT8 or RAFTER_E4M3 */
  int32_t tree_mask; /* 1: the last seqlen_q keys, at most 64, are the queries' own tokens, and
                        which of those a query sees is given at run time; wants no mask */
} rafter_problem;

typedef struct rafter_plan_options {
  size_t size; /* sizeof(rafter_plan_options) */
  rafter_device device;
  int32_t device_index;
  rafter_pipeline pipeline; /* default: that of the cheapest kernel */
  int32_t threads;          /* CPU; 0: the OpenMP default */
  int64_t splits;           /* split-kv: parts of the keys; 0 chooses */
  const char* kernel;       /* forces the kernel of this name (`rafter kernels` lists them) */
  const char*
      device_spec;  /* ceilings for the prediction: a name of the device database, or the path
                       of a device file (it has a '/'); default: an estimate of this machine */
  rafter_pass pass; /* what the plan runs: rafter_forward or rafter_backward */
  int32_t reserved; /* 0 */
} rafter_plan_options;

/* ---- plans */

typedef struct rafter_plan rafter_plan;

/* Validates the problem, chooses the accepted kernel of least predicted time, sizes the workspace.
 * options may be null. On success *plan is the caller's, until rafter_plan_destroy; on error it is
 * null. Errors: invalid argument names the field; unsupported lists every kernel and why it
 * refused. */
rafter_status rafter_plan_create(const rafter_problem* problem, const rafter_plan_options* options,
                                 rafter_plan** plan);
/* null does nothing. */
void rafter_plan_destroy(rafter_plan* plan);

/* Bytes that a run needs, at an address that is a multiple of 64; -1 for a null plan. */
int64_t rafter_plan_workspace_bytes(const rafter_plan* plan);
/* The chosen kernel; several lines on the problem, the kernel, its wall and every candidate. Both
 * live as long as the plan; null for a null plan. */
const char* rafter_plan_kernel(const rafter_plan* plan);
const char* rafter_plan_explain(const rafter_plan* plan);

typedef struct rafter_forward_args {
  size_t size;     /* sizeof(rafter_forward_args) */
  rafter_tensor q; /* [batch, seqlen_q, heads_q, head_dim] */
  rafter_tensor k; /* [batch, seqlen_kv, heads_kv, head_dim] */
  rafter_tensor v; /* [batch, seqlen_kv, heads_kv, head_dim_v] */
  rafter_tensor o; /* [batch, seqlen_q, heads_q, head_dim_v] */
  rafter_lse lse;
  rafter_indices cu_seqlens_q, cu_seqlens_kv; /* packed: [batch + 1] */
  rafter_indices seqused_kv;                  /* [batch] */
  rafter_indices page_table;                  /* paged: [batch, pages per sequence] */
  void* workspace;                            /* contents before and after mean nothing */
  int64_t workspace_bytes;
  void* stream; /* CUDA: a cudaStream_t, null for the default stream; CPU: null */
  /* kv_dtype RAFTER_INT8 or RAFTER_E4M3: f32 factors, one per token and KV head, in the layout of k
   * with a head_dim of 1: [batch, seqlen_kv, heads_kv, 1]; paged [pages, page_size, heads_kv, 1];
   * strides of 0 for one per KV head. A null data: not given, which e4m3 takes for 1. */
  rafter_tensor k_scale, v_scale;
  rafter_bits tree_mask;   /* [batch, seqlen_q]: bit j of word i says that query i sees key
                              seqlen_kv - seqlen_q + j */
  rafter_counts bad_pages; /* paged, may be null: [batch], how many pages of a sequence are not in
                              [0, num_pages); on CUDA their keys are not seen and nothing is
                              counted where seqlen_q is 0, on the CPU they are errors */
} rafter_forward_args;

/* O = softmax(softmax_scale * Q K^T + mask) V, accumulated in f32. Decoding is the same call with
 * few queries. A row that sees no key gives o = 0 and lse = -infinity. Allocates nothing and
 * synchronises nothing. On CUDA every pointer is device memory and the work is queued on `stream`.
 * Errors: invalid argument names what does not fit the problem; nothing is written then. */
rafter_status rafter_forward(const rafter_plan* plan, const rafter_forward_args* args);

typedef struct rafter_backward_args {
  size_t size;       /* sizeof(rafter_backward_args) */
  rafter_tensor q;   /* what the forward pass took: [batch, seqlen_q, heads_q, head_dim] */
  rafter_tensor k;   /* [batch, seqlen_kv, heads_kv, head_dim] */
  rafter_tensor v;   /* [batch, seqlen_kv, heads_kv, head_dim_v] */
  rafter_tensor o;   /* what it gave: [batch, seqlen_q, heads_q, head_dim_v] */
  rafter_lse lse;    /* [batch, heads_q, seqlen_q] */
  rafter_tensor d_o; /* the gradient of o */
  rafter_lse dlse;   /* the gradient of lse; a null data: zero */
  rafter_tensor dq;  /* results, like q, k and v, each of the problem's dtype or f32; */
  rafter_tensor dk;  /* dk and dv are summed over the group */
  rafter_tensor dv;
  rafter_indices cu_seqlens_q, cu_seqlens_kv; /* packed: [batch + 1] */
  rafter_indices seqused_kv;                  /* [batch] */
  void* workspace;
  int64_t workspace_bytes;
  void* stream;
} rafter_backward_args;

/* dq, dk, dv of a loss whose gradients with respect to o and lse are d_o and dlse. Wants a plan
 * made with pass = RAFTER_PASS_BACKWARD; the same bits every time. A row that sees no key has
 * gradient 0, and so has a key that no row sees; rows that belong to no sequence are not written.
 * Errors: as rafter_forward. */
rafter_status rafter_backward(const rafter_plan* plan, const rafter_backward_args* args);

/* Part of an attention result over some of the keys. */
typedef struct rafter_state {
  rafter_tensor o;
  rafter_lse lse;
} rafter_state;

/* Merges states over disjoint keys into the state over their union: lse = log sum exp(lse_i), o =
 * sum exp(lse_i - lse) o_i. An empty state (lse = -infinity) with X is X to the bit. `out` may be
 * one of the states. Runs on the CPU. */
rafter_status rafter_merge(const rafter_state* states, size_t count, const rafter_state* out);
/* The same where the states lie: on RAFTER_CUDA their pointers are device memory, at most 256
 * states are merged, and the work is queued on `stream`; on RAFTER_CPU stream is null. */
rafter_status rafter_merge_on(rafter_device device, int32_t device_index, void* stream,
                              const rafter_state* states, size_t count, const rafter_state* out);

/* ---- caches */

typedef int32_t rafter_rope_pairs;
enum {
  RAFTER_ROPE_HALF_SPLIT = 0, /* elements i and i + rotary_dim / 2 (GPT-NeoX, Llama) */
  RAFTER_ROPE_INTERLEAVED = 1 /* elements 2i and 2i + 1 (GPT-J) */
};

typedef struct rafter_append_args {
  size_t size; /* sizeof(rafter_append_args) */
  rafter_device device;
  int32_t device_index;
  void* stream;               /* CUDA: a cudaStream_t, null for the default stream; CPU: null */
  rafter_tensor k;            /* [batch, seqlen, heads_kv, head_dim]: f32, f16 or bf16 */
  rafter_tensor v;            /* [batch, seqlen, heads_kv, head_dim_v] of the same dtype */
  rafter_indices seqused_kv;  /* [batch]: lengths before; row i belongs behind them and i more */
  rafter_indices seqused_new; /* [batch]: how many of the rows are there; not given: all */
  rafter_indices page_table;  /* [batch, pages per sequence]; not given: a dense cache */
  rafter_tensor k_cache;      /* [batch, capacity, ..] or [pages, page_size, ..]: of the dtype of */
  rafter_tensor v_cache;      /* k, or RAFTER_INT8, or RAFTER_E4M3 */
  rafter_tensor k_scale_given; /* 8-bit caches: f32 factors [1, 1, heads_kv, 1] to divide by */
  rafter_tensor v_scale_given; /* .. or not given */
  rafter_tensor k_scale;       /* 8-bit caches: f32 factors to compute, one for each row of the */
  rafter_tensor v_scale;       /* cache, in its layout with a head_dim of 1; or not given */
  const float* rope_cos; /* tables [rope_positions, rotary_dim / 2] of the angles that k, and */
  const float* rope_sin; /* q where it is given, are turned by; not given: no rotation */
  int64_t rope_positions;
  int64_t rotary_dim; /* even, up to head_dim; 0: no rotation */
  rafter_rope_pairs rope_pairs;
  int32_t reserved; /* 0 */
  rafter_tensor q; /* [batch, seqlen, heads_q, head_dim] to turn in the same launch; or not given */
  rafter_tensor q_out;   /* of q's shape and dtype, may be q; given with q */
  rafter_counts dropped; /* [batch]: how many new tokens were not written; may be null */
} rafter_append_args;

/* Writes the rows of new tokens into a cache, turned and quantised as asked. A token is not
 * written, and counted in `dropped`, when its position is beyond the capacity or the tables of the
 * rotation, or its page is not one of the cache. Allocates nothing and synchronises nothing.
 * Errors: invalid argument names what does not fit; nothing is written then. */
rafter_status rafter_append(const rafter_append_args* args);

/* ---- what it costs and which wall it meets */

typedef struct rafter_cost {
  size_t size; /* sizeof(rafter_cost), set before the call */
  double flops, matmul_flops, softmax_flops;
  double bytes;           /* of main-memory traffic */
  double footprint_bytes; /* live at once */
  double launches;
  double intensity_flop_per_byte, ridge_flop_per_byte;
  double attainable_flop_per_s;
  double time_s; /* predicted: the largest of the three below */
  double time_compute_s, time_bandwidth_s;
  double time_dispatch_s; /* NaN when the device has no launch cost */
  rafter_wall wall;
  int32_t near_ridge;
} rafter_cost;

/* Of a plan, on the ceilings it was made for. */
rafter_status rafter_plan_cost(const rafter_plan* plan, rafter_cost* cost);
/* Of one pass of a problem by a pipeline (RAFTER_PIPELINE_ANY: fused) on any device, which need not
 * be here: a name of the device database, or the path of a device file. */
rafter_status rafter_explain(const rafter_problem* problem, rafter_pipeline pipeline,
                             const char* device, rafter_cost* cost);
rafter_status rafter_explain_backward(const rafter_problem* problem, rafter_pipeline pipeline,
                                      const char* device, rafter_cost* cost);

#ifdef __cplusplus
}
#endif
