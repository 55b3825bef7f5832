/* C = act(alpha * (A @ B) + bias[:, None]), joined with another matrix, for a 2:4 A and up to 32 columns of B.

       rows of C            K, cut into PARTS, and each part into WARPS        one step of a warp: 128 columns of A
     .------------.  .----+----+-- ... --.----+----+-- ... --.
     | tile of TM |  |warp|warp|  CTA 0  |warp|warp|  CTA 1  |  a cluster      values      [TM][128 bytes]
     |------------|  |----+----+-- ... --|----+----+-- ... --|                 metadata    [TM][16 bytes]
     |            |  |    |    |         |    |    |         |                 B           [8*NT columns][256 bytes]
     '------------'  '----+----+-- ... --'----+----+-- ... --'

   A's bytes decide, so what counts is how many are under way. Each warp has a ring of its own of DEPTH steps in shared
   memory, copies all that it multiplies by itself and waits for nobody else before the end. There it leaves its sums in
   its ring, and these of all warps of the cluster are added in the order of K: the same bits in every run.

   Rows in shared memory are swizzled: 16 bytes number i of row r lie at place i ^ r % 8. So ldmatrix reads 8 rows from 32
   banks. An mma.sp takes 32 of a step's 128 columns: blocks X and X + 2 of 16, where X is 4s + h for number (s, h). For
   then ldmatrix reads metadata too: lane t of a quad is given that of blocks 2t and 2t + 1 of its row, and number
   (s, h) wants block X from lane 2s, and block X + 2 from lane 2s + 1.

   Capital names that are not defined here are constants of the compilation: Config.defines in hopper_skinny_24.py. No
   include: NVRTC compiles this file as it is. */

#define PTX __device__ __forceinline__
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef long long i64;

struct alignas(16) Quad { u32 x[4]; };

struct Params {
  const u8* values;                       // [m, k/2]
  const u8* meta;                         // [m, k/8] bytes
  const u16* b;                           // [k, n]
  u16* c;                                 // [m, n]
  const u16* bias;                        // [m] or null
  const u16* other;                       // [m, n], or null where it is C itself
  i64 sb_k, sb_n, sc_m, sc_n, so_m, so_n; // strides in elements
  int m, n, k;
  int wide;  // columns of B are contiguous and aligned to 16 bytes
  int by_columns;  // C is contiguous along m
  int activation, combine;  // indices, as in hopper_24.py
  float alpha, beta;
};

constexpr int THREADS = 32 * WARPS, TM = 16 * MS, ROWS = TM / PARTS;
constexpr int PITCH = TM + 4;  // of sums: lanes of a warp write to 32 banks
constexpr int A_BYTES = 128, META_BYTES = 16, B_BYTES = 256;     // of a row, or column of B, in a step
constexpr int META_AT = TM * A_BYTES, B_AT = META_AT + TM * META_BYTES, SLOT = B_AT + 8 * NT * B_BYTES;
constexpr int RING = DEPTH * SLOT;
static_assert(MS % 2 == 0, "metadata is read for two slabs of 16 rows at once");
static_assert(WARPS * RING == SMEM_BYTES, "hopper_skinny_24.py counts shared memory differently");
static_assert(8 * NT * PITCH * 4 <= RING, "sums need more shared memory");

// ---------------------------------------------------------------------------------------------------- PTX wrappers

// Asynchronous copies that a thread waits for by groups. L2 prefetches 256 bytes: the next steps need what follows.
PTX void copy16(void* to, const u8* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;"
               ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
PTX void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N groups of this thread are in flight.
template <int N> PTX void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Four matrices of 8 rows of 16 bytes. Lane 8i + r gives the address of row r of matrix i; lane 4g + t receives
// bytes 4t to 4t + 3 of row g of every matrix.
PTX Quad load_matrices(const u8* at) {
  Quad q;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(q.x[0]), "=r"(q.x[1]), "=r"(q.x[2]), "=r"(q.x[3])
               : "r"((u32)__cvta_generic_to_shared(at)) : "memory");
  return q;
}

#if HALF
#define TYPES "f32.f16.f16.f32"
#else
#define TYPES "f32.bf16.bf16.f32"
#endif
// d[16, 8] += A24[16, 32] @ B[32, 8]. Lanes 2*SEL and 2*SEL + 1 of a quad give the metadata, 16 columns each: row g
// in the low half, row g + 8 in the high half.
template <int SEL> PTX void mma(float (&d)[4], const Quad& a, const Quad& b, u32 meta) {
  asm volatile(
      "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col." TYPES
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]),
        "r"(meta), "n"(SEL));
}

// Low halves of x and y, or high ones.
PTX u32 halves(u32 x, u32 y, int high) { return __byte_perm(x, y, high ? 0x7632 : 0x5410); }

PTX u8* shared_memory() {
  extern __shared__ __align__(128) u8 shared[];
  return shared;
}
PTX void warp_sync() { __syncwarp(); }
PTX int cluster_rank() {
  u32 rank = 0;
  if constexpr (PARTS > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
PTX void cluster_sync() {
  if constexpr (PARTS == 1) __syncthreads();
  else asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The value at `at`'s address in CTA `rank` of the cluster.
PTX float of_peer(const float* at, int rank) {
  if constexpr (PARTS == 1) return *at;
  float x;
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}"
               : "=f"(x) : "r"((u32)__cvta_generic_to_shared(at)), "r"(rank) : "memory");
  return x;
}

PTX u16 rounded(float x) {
  u16 y;
  if constexpr (HALF) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

PTX float widen(u16 x) {
  float y = __uint_as_float((u32)x << 16);
  if constexpr (HALF) asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

// ---------------------------------------------------------------------------------------------------- tiles and roles

// B[k:k+8, n], where that is not 16 contiguous bytes.
PTX Quad gathered(const Params& p, int k, int n) {
  const u16* at = p.b + k * p.sb_k + n * p.sb_n;
  Quad q;
#pragma unroll
  for (int i = 0; i < 4; i++) q.x[i] = at[2 * i * p.sb_k] | (u32)at[(2 * i + 1) * p.sb_k] << 16;
  return q;
}

// The address of 16 bytes of a swizzled row.
PTX int place(int row, int piece, int row_bytes) { return row * row_bytes + (piece ^ row % 8) * 16; }

PTX float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

PTX float activated(float z, int activation) {
  switch (activation) {
    case 1: return z < 0.f ? 0.f : z;  // NaN stays
    case 2: return 0.5f * z * (1.f + erff(z * 0.70710678f));
    case 3: return z * sigmoid(z * (1.5957691f + 0.071354816f * z * z));
    case 4: return z * sigmoid(z);
    default: return z;
  }
}

extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    semi24_skinny_kernel(const __grid_constant__ Params p) {
  u8* const shared = shared_memory();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = cluster_rank(), tile = (int)blockIdx.x / PARTS * TM, rows = p.m - tile;
  u8* const ring = shared + warp * RING;
  // This warp's part of K, in steps.
  const i64 steps = p.k / 128, part = rank * WARPS + warp;
  const int first = (int)(steps * part / (PARTS * WARPS)), end = (int)(steps * (part + 1) / (PARTS * WARPS));

  // Rows below the matrix and columns beyond B are not copied, and their sums not stored. But metadata must be
  // valid: the last row's is used.
  const u8* const values = p.values + (i64)(tile + lane / 8) * p.k + lane % 8 * 16;
  const u8* meta[MS / 2];
#pragma unroll
  for (int i = 0; i < MS / 2; i++) meta[i] = p.meta + (i64)(tile + min(32 * i + lane, rows - 1)) * (p.k / 8);
  const i64 four_rows = 4 * (i64)p.k;
  auto bring = [&](int step, u8* to) {  // one group, empty after the end
    if (step < end) {
      const u8* from = values + (i64)step * A_BYTES;
#pragma unroll
      for (int i = 0; i < TM / 4; i++)
        if (4 * i + lane / 8 < rows) copy16(to + place(4 * i + lane / 8, lane % 8, A_BYTES), from + i * four_rows);
#pragma unroll
      for (int i = 0; i < MS / 2; i++)
        copy16(to + META_AT + (32 * i + lane) * META_BYTES, meta[i] + (i64)step * META_BYTES);
      const int n = lane / 16, k = step * 128 + lane % 16 * 8;
      if (p.wide) {
        const u16* column = p.b + n * p.sb_n + k;
#pragma unroll
        for (int i = 0; i < 8 * NT; i += 2, column += 2 * p.sb_n)
          if (i + n < p.n) copy16(to + B_AT + place(i + n, lane % 16, B_BYTES), (const u8*)column);
      } else
#pragma unroll 4
        for (int i = n; i < p.n; i += 2) *(Quad*)(to + B_AT + place(i, lane % 16, B_BYTES)) = gathered(p, k, i);
    }
    commit_copies();
  };
  float d[MS][NT][4] = {};
  auto multiply = [&](const u8* at) {
    wait_copies<DEPTH - 1>();  // of this step
    warp_sync();  // and those of the other lanes
    Quad words[MS / 2];        // metadata of two slabs of rows: rows g and g + 8 of each
#pragma unroll
    for (int i = 0; i < MS / 2; i++) words[i] = load_matrices(at + META_AT + (32 * i + lane) * META_BYTES);
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int block = 4 * s + h + lane / 16 * 2;
        Quad a[MS];
#pragma unroll
        for (int m = 0; m < MS; m++) a[m] = load_matrices(at + place(16 * m + lane % 16, block, A_BYTES));
#pragma unroll
        for (int j = 0; j < NT; j++) {
          const Quad b = load_matrices(at + B_AT + place(8 * j + lane % 8, 2 * block + lane / 8 % 2, B_BYTES));
#pragma unroll
          for (int m = 0; m < MS; m++) {
            const u32 e = halves(words[m / 2].x[m % 2 * 2], words[m / 2].x[m % 2 * 2 + 1], h);
            if (s == 0) mma<0>(d[m][j], a[m], b, e);
            else mma<1>(d[m][j], a[m], b, e);
          }
        }
      }
    warp_sync();  // all lanes have read the slot
  };
  for (int step = first - DEPTH, slot = 0; step < end; step++) {  // the first DEPTH times nothing is loaded yet
    u8* const at = ring + slot * SLOT;
    if (step >= first) multiply(at);
    bring(step + DEPTH, at);
    if (++slot == DEPTH) slot = 0;
  }

  float* const sums = (float*)ring;  // [8*NT][PITCH], in the memory of the ring
#pragma unroll
  for (int m = 0; m < MS; m++)
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[(8 * j + 2 * t + i % 2) * PITCH + 16 * m + i / 2 * 8 + g] = d[m][j][i];
  cluster_sync();  // the sums of all parts are written

  // Each CTA of the cluster finalizes its share of the rows.
  for (int at = threadIdx.x; at < ROWS * p.n; at += THREADS) {
    const int r = p.by_columns ? at % ROWS : at / p.n, n = p.by_columns ? at / ROWS : at % p.n;
    const i64 row = tile + rank * ROWS + r;
    if (row >= p.m) continue;
    float parts[PARTS * WARPS], z = 0.f;
#pragma unroll
    for (int q = 0; q < PARTS * WARPS; q++)
      parts[q] = of_peer((float*)(shared + q % WARPS * RING) + n * PITCH + rank * ROWS + r, q / WARPS);
#pragma unroll
    for (int q = 0; q < PARTS * WARPS; q++) z += parts[q];
    z *= p.alpha;
    if (p.bias) z += widen(p.bias[row]);
    z = activated(z, p.activation);
    if (p.combine) {
      const float with = widen(p.other ? p.other[row * p.so_m + n * p.so_n] : p.c[row * p.sc_m + n * p.sc_n]);
      z = p.combine == 1 ? fmaf(p.beta, with, z) : z * with;
    }
    p.c[row * p.sc_m + n * p.sc_n] = rounded(z);
  }
  if (PARTS > 1) cluster_sync();  // until the other CTAs have read this one's sums
}
