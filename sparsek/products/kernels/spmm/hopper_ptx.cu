/* What the kernels of hopper_24.cu and hopper_paired.cu have in common: PTX wrappers, matrix descriptors, activations.
   Their line that includes this file is replaced by it before NVRTC compiles them (engine/launch/nvrtc.py).
   CLUSTER, HALF, C_COL and ACT are constants of the compilation. */

// ---------------------------------------------------------------------------------------------------- PTX wrappers

PTX void barrier_init(u32 at, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

// Makes initialised barriers visible to TMA and to the other CTAs.
PTX void barriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

PTX void barrier_expect(u32 at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

// Arrives at the barrier at `at` in CTA `rank` of the cluster. It needs no .release.cluster, which would fence all
// memory in every step: wgmma that was waited for, or threads that have fenced, have read the guarded data.
PTX void barrier_arrive(u32 at, u32 rank) {
  if constexpr (CLUSTER == 1) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
  else asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(at), "r"(rank) : "memory");
}

// Waits until the phase of parity `phase` is over. A fresh barrier passes for parity 1, the phase before its first.
PTX void barrier_wait(u32 at, u32 phase) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(at), "r"(phase) : "memory");
  } while (!done);
}

PTX void tma_store(const TensorMap& map, u32 from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(&map), "r"(x), "r"(y), "r"(from) : "memory");
}

PTX void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until shared memory that stores read may be written again.
PTX void tma_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

PTX void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
PTX void warpgroup_sync(int wg) { asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory"); }

// One lane of a full warp. The compiler sees that it is one, and issues TMA without a loop over lanes.
PTX bool elected() {
  u32 yes;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(yes));
  return yes;
}

PTX void cluster_sync() {
  if constexpr (CLUSTER == 1) asm volatile("bar.sync 0;" ::: "memory");
  else asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

PTX void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PTX void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups are in flight.
template <int N> PTX void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Marks x as written here, so that its readers stay after the preceding wait.
PTX void written_until_here(float& x) { asm volatile("" : "+f"(x)::"memory"); }

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define F32(d, i) F16(d, i), F16(d, i + 16)
#define TEN(t)                                                                                                         \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define THIRTY(a, b, c) TEN(a) TEN(b) TEN(c)
#define SUMS_256(d) F32(d, 0), F32(d, 32), F32(d, 64), F32(d, 96)
#define NAMES_256                                                                                                      \
  THIRTY(, 1, 2) THIRTY(3, 4, 5) THIRTY(6, 7, 8) THIRTY(9, 10, 11) "%120, %121, %122, %123, %124, %125, %126, %127"

#if C_COL
#define TURNED ".trans"
#else
#define TURNED ""
#endif

// Four 8 x 8 matrices; every lane gives the address of one row.
PTX void store_matrix(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4" TURNED ".shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

PTX u32 round_pair(float lower, float upper) {
  u32 pair;
  if constexpr (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
  return pair;
}

PTX float widen(u16 x) {
  float y = __uint_as_float((u32)x << 16);
  if constexpr (HALF) asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

PTX float exp2_of(float x) { asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x)); return x; }
PTX float inverse(float x) { asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x)); return x; }
PTX float tanh_of(float x) { asm("tanh.approx.f32 %0, %0;" : "+f"(x)); return x; }

PTX u32 cluster_rank() {
  u32 rank = 0;
  if constexpr (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// ---------------------------------------------------------------------------------------------------- tiles and roles

// The address in a matrix descriptor: 14 bits, in units of 16 bytes. In a cluster, higher address bits identify the
// CTA and would overflow into the next field.
__device__ constexpr u64 place(u32 at) { return (at & 0x3FFFF) >> 4; }

// The matrix descriptor without its address: bytes between groups of 8 rows, bytes between panels, swizzle.
__device__ constexpr u64 described(int group_bytes, int panel_bytes, int swizzle_bytes) {
  return (u64)(panel_bytes >> 4) << 16 | (u64)(group_bytes >> 4) << 32 |
         (swizzle_bytes == 128 ? 1ull : swizzle_bytes == 64 ? 2ull : 3ull) << 62;
}

// act(z) in float32. Sigmoid and tanh forms as in products/kernels/spmm/multiply.py, where their errors are stated.
PTX float activated(float z) {
  if constexpr (ACT == 0) return z;
  if constexpr (ACT == 1) return z < 0.f ? 0.f : z;  // NaN stays
  float u;                                           // act(z) = z * sigmoid(2u)
  if constexpr (ACT == 2 && HALF) {                  // gelu
    const float x = fminf(fmaxf(z, -6.f), 6.f), s = x * x;
    u = x * fmaf(s, fmaf(s, -0.00035151683f, 0.03700565f), 0.79750788f);
  } else if constexpr (ACT == 2) {
    u = z * fmaf(z * z, 0.03470089f, 0.80015708f);
  } else if constexpr (ACT == 3) {  // gelu_tanh
    u = z * fmaf(z * z, 0.035677408f, 0.7978846f);
  } else {  // silu
    u = 0.5f * z;
  }
  return z * (HALF ? inverse(exp2_of(u * -2.8853901f) + 1.f) : fmaf(tanh_of(u), 0.5f, 0.5f));
}
