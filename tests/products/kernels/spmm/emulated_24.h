// The PTX wrappers of hopper_24.cu on a CPU. Threads are fibers; what is asynchronous happens as late, or as early, as it
// may, and reads shared memory and registers when it happens. hopper_24_emulated.py includes this in place of the
// wrappers, and once more behind the roles, with RUNS defined.
#ifndef RUNS
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <ucontext.h>
#include <vector>
#define __device__
#define __global__
#define __forceinline__
#define __shared__
#define __align__(n)
#define __grid_constant__
#define __cluster_dims__(...)
#define __launch_bounds__(...)
using std::fmaf; using std::max; using std::min;

struct Dim { unsigned x, y, z; };
struct Barrier { int count = 0, pending = 0; long tx = 0; unsigned phase = 0; bool live = false; };
struct Cta;
using Action = std::function<void()>;
struct Fiber {
  ucontext_t at; std::vector<char> stack; Cta* cta; Dim tid; bool done = false;
  std::function<bool()> ready;             // null: may run
  std::deque<std::vector<Action>> groups;  // committed wgmma groups, kept by thread 0 of a warpgroup
  std::vector<Action> open;                // wgmma that are not committed
  std::deque<std::vector<Action>> stores; std::vector<Action> open_stores;
};
struct Rendezvous { int arrived = 0; unsigned generation = 0; };
struct Cta {
  std::vector<unsigned char> smem; std::map<unsigned, Barrier> barriers; std::vector<Fiber*> fibers;
  int rank; unsigned block; std::map<int, Rendezvous> meet;
};
static const unsigned BASE = 1024;         // where dynamic shared memory begins
static std::vector<Cta*> cluster; static Rendezvous cluster_meet;
static Fiber* me; static ucontext_t scheduler;
static std::vector<Action> in_flight;      // TMA loads that were issued
static std::mt19937 rng; static unsigned grid; static std::string trouble;
static int lateness;                       // 0 early, 1 mixed, 2 late
static Dim block_of() { return {me->cta->block, 0, 0}; }
#define threadIdx (me->tid)
#define blockIdx (block_of())
#define gridDim (Dim{grid, 1, 1})
#define __shfl_sync(mask, x, lane) (x)
#define __trap() fail("trap")
static unsigned char shared[16];
// In a cluster the bits from 24 on say whose shared memory it is.
static unsigned __cvta_generic_to_shared(void*) { return BASE | (unsigned)me->cta->rank << 24; }
static unsigned inside(unsigned at) { return at & 0xffffff; }
static void fail(const std::string& why) { if (trouble.empty()) trouble = why; }
static void block_until(std::function<bool()> ready) {
  if (ready() && rng() % 4) return;
  me->ready = ready;
  swapcontext(&me->at, &scheduler);
  me->ready = nullptr;
}
static unsigned char* shared_at(Cta* c, unsigned at, unsigned bytes) {
  at = inside(at);
  if (at < BASE || at + bytes > BASE + c->smem.size()) {
    fail("shared memory out of range");
    return c->smem.data();
  }
  return c->smem.data() + (at - BASE);
}
static void complete(Barrier& b) {
  if (b.pending == 0 && b.tx == 0) b.phase++, b.pending = b.count;
}
static bool meet(Rendezvous& r, int n) {   // true in the last one to come
  const unsigned g = r.generation;
  if (++r.arrived == n) {
    r.arrived = 0, r.generation++;
    return true;
  }
  block_until([&r, g] { return r.generation != g; });
  return false;
}
static bool meet_all(int what, int size) {  // the warps (size 32) or the warpgroup (128) of a thread
  return meet(me->cta->meet[what + (int)me->tid.x / size], size);
}

static u16 to16(float x) {
  if (HALF) { const _Float16 h = (_Float16)x; u16 y; memcpy(&y, &h, 2); return y; }
  if (x != x) return 0x7fff;
  u32 u; memcpy(&u, &x, 4);
  return (u16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static float from16(u16 x) {
  if (HALF) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
  const u32 u = (u32)x << 16; float y; memcpy(&y, &u, 4);
  return y;
}

#if FP8
static float from8(unsigned char x, bool e5m2) {
  const int most = e5m2 ? 2 : 3, e = (x & 127) >> most, bias = e5m2 ? 15 : 7;
  const float fraction = (float)(x & ((1 << most) - 1)) / (float)(1 << most);
  const float size = e ? std::ldexp(1.f + fraction, e - bias) : std::ldexp(fraction, 1 - bias);
  return x & 128 ? -size : size;
}
#endif

static void barrier_init(u32 at, u32 count) {
  Barrier& b = me->cta->barriers[inside(at)];
  b = Barrier(), b.count = b.pending = (int)count, b.live = true;
  shared_at(me->cta, at, 8);
}
static void barriers_made() {}
static Barrier& barrier(Cta* c, u32 at) {
  Barrier& b = c->barriers[inside(at)];
  if (!b.live) fail("no barrier there");
  return b;
}
static void arrive(Barrier& b) {
  if (--b.pending < 0) fail("too many arrivals");
  complete(b);
}
static void barrier_expect(u32 at, u32 bytes) {
  Barrier& b = barrier(me->cta, at);
  b.tx += bytes;
  arrive(b);
}
static void barrier_arrive(u32 at, u32 rank) {
  Cta* there = cluster[CLUSTER == 1 ? me->cta->rank : (int)rank];
  if (CLUSTER > 1 && there->fibers[0]->done) fail("arrival at a CTA that is gone");
  arrive(barrier(there, at));
}
// As the hardware: a wait passes if the phase of that parity is the one just over.
static void barrier_wait(u32 at, u32 phase) {
  Barrier* b = &barrier(me->cta, at);
  block_until([b, phase] { return (b->phase & 1) != (phase & 1); });
}
static u32 swizzled(u32 at, int width) { return at ^ ((at >> 3) & (width == 128 ? 0x70 : width == 64 ? 0x30 : 0)); }

// opaque: pointer, bytes of an element, inner and outer size, outer stride in bytes, inner and outer box
static void copy_box(Cta* c, u32 at, const TensorMap* m, int x, int y, bool in) {
  const i64 e = m->opaque[1], w = m->opaque[2], h = m->opaque[3], ld = m->opaque[4], bx = m->opaque[5];
  if (at % 128) fail("TMA to or from an unaligned place");
  for (i64 r = 0; r < (i64)m->opaque[6]; r++)
    for (i64 q = 0; q < bx; q++) {
      const bool there = x + q >= 0 && x + q < w && y + r >= 0 && y + r < h;
      char* outside = (char*)m->opaque[0] + (y + r) * ld + (x + q) * e;
      unsigned char* inside = shared_at(c, swizzled(at + (u32)((r * bx + q) * e), (int)(bx * e)), (unsigned)e);
      if (in && there) memcpy(inside, outside, e);
      else if (in) memset(inside, 0, e);
      else if (there) memcpy(outside, inside, e);
    }
}
static void landed_bytes(Cta* c, u32 landed, i64 bytes) {
  Barrier& b = barrier(c, landed);
  b.tx -= bytes;
  complete(b);
}
static void fly(Action f) {
  if (lateness == 0) f();
  else in_flight.push_back(f);
}
static void load_into(Cta* c, u32 to, const TensorMap* m, u32 landed, int x, int y) {
  fly([=] {
    copy_box(c, to, m, x, y, true);
    landed_bytes(c, landed, m->opaque[1] * m->opaque[5] * m->opaque[6]);
  });
}
static void tma_load(u32 to, const TensorMap& map, u32 landed, int x, int y) {
  load_into(me->cta, to, &map, landed, x, y);
}
static void tma_load_all(u32 to, const TensorMap& map, u32 landed, int x, int y) {
  for (Cta* c : cluster) load_into(c, to, &map, landed, x, y);  // the copies need not land together
}
static const char* nibbles_from; static i64 nibbles_bytes;
static void bulk_load(u32 to, const void* from, u32 bytes, u32 landed) {
  Cta* c = me->cta;
  const char* f = (const char*)from;
  if (f < nibbles_from || f + bytes > nibbles_from + nibbles_bytes || bytes % 16 || to % 16 || (i64)f % 16) {
    fail("nibbles out of range");
    f = nibbles_from;
  }
  fly([=] {
    memcpy(shared_at(c, to, bytes), f, bytes);
    landed_bytes(c, landed, bytes);
  });
}
static void tma_store(const TensorMap& map, u32 from, int x, int y) {
  Cta* c = me->cta;
  const TensorMap* m = &map;
  me->open_stores.push_back([=] { copy_box(c, from, m, x, y, false); });
}
static void tma_store_commit() { me->stores.push_back(std::move(me->open_stores)), me->open_stores.clear(); }
static void tma_store_wait() {
  if (!me->open_stores.empty()) fail("stores that were not committed");
  for (auto& group : me->stores) for (auto& store : group) store();
  me->stores.clear();
}
static void fence_proxy() {}
static void warpgroup_sync(int wg) { meet(me->cta->meet[100 + wg], 128); }
static bool elected() { return me->tid.x % 32 == 0; }
static void cluster_sync() { meet(cluster_meet, (int)(CLUSTER * THREADS)); }
static void written_until_here(float&) {}
static void wgmma_fence() {}

// What each of the 128 threads of a warpgroup hands to one wgmma: registers, which are read when it runs.
struct Operands { float* d; const u32* nibbles; };
static std::map<Fiber*, std::vector<Operands>> handed;
static Fiber* head() { return me->cta->fibers[me->tid.x / 128 * 128]; }
// The value at row or column `mn` and inner place `k` of a described matrix; source: PTX ISA, canonical layouts.
static float described_at(Cta* c, u64 desc, bool k_major, int mn, int k) {
  const u32 start = (u32)(desc & 0x3fff) << 4, panel = (u32)(desc >> 16 & 0x3fff) << 4;
  const u32 group = (u32)(desc >> 32 & 0x3fff) << 4;
  const int width = desc >> 62 == 1 ? 128 : 64;
  const int size = FP8 ? 1 : 2;
  const u32 at = k_major ? start + mn / 8 * group + mn % 8 * width + k * size
                         : start + mn / 64 * panel + k / 8 * group + k % 8 * 128 + mn % 64 * 2;
  const unsigned char* x = shared_at(c, swizzled(at, width), size);
#if FP8
  return from8(*x, FP8_TYPE[width == 128 ? 7 : 2] == '5');  // ".e4m3.e5m2", and B is 128 bytes wide
#else
  u16 y;
  memcpy(&y, x, 2);
  return from16(y);
#endif
}
// The nibble of group j / 2 of row r, of a wgmma's columns.
static u32 nibble_of(const std::vector<Operands>& ops, int sel, int r, int j) {
  const int first = 32 * (r / 16) + 4 * (r % 8), high = r % 16 / 8;
  if (FP8) return *ops[first + 2 * (j / 16) + high].nibbles >> 4 * (j / 2 % 8) & 15;
  return *ops[first + 2 * sel + j / 8].nibbles >> (16 * high + 4 * (j / 2 % 4)) & 15;
}
template <int SEL> static void product(Cta* c, const std::vector<Operands>& ops, u64 a, u64 b, int keep) {
  constexpr int K = FP8 ? 64 : 32;
  static float A[64][K], B[K][TN];
  memset(A, 0, sizeof A);
  for (int r = 0; r < 64; r++)
    for (int j = 0; j < K / 2; j++) {  // stored value j of row r: group j / 2 of four columns
      const u32 nibble = nibble_of(ops, SEL, r, j);
      if ((nibble & 3) >= nibble >> 2) fail("malformed nibble");
      A[r][j / 2 * 4 + (j % 2 ? nibble >> 2 : nibble & 3)] = described_at(c, a, true, r, j);
    }
  for (int k = 0; k < K; k++)
    for (int n = 0; n < TN; n++) B[k][n] = described_at(c, b, !B_ROW, n, k);
  for (int r = 0; r < 64; r++)
    for (int n = 0; n < TN; n++) {
      float& s = ops[32 * (r / 16) + 4 * (r % 8) + n % 8 / 2].d[n / 8 * 4 + r % 16 / 8 * 2 + n % 2];
      if (!keep) s = 0.f;
      for (int k = 0; k < K; k++) if (A[r][k] != 0.f) s += A[r][k] * B[k][n];
    }
}
template <int SEL> static void wgmma(float (&d)[TN / 2], u64 a, u64 b, const u32& nibbles, int keep) {
  auto& all = handed[head()];
  all.resize(128);
  all[me->tid.x % 128] = {d, &nibbles};
  if (!meet_all(200, 128)) return;
  Cta* c = me->cta;
  head()->open.push_back([c, ops = all, a, b, keep] { product<SEL>(c, ops, a, b, keep); });
}
static void wgmma_commit() {
  if (me->tid.x % 128 == 0) me->groups.push_back(std::move(me->open)), me->open.clear();
}
template <int N> static void wgmma_wait() {  // as late as may be: only what must be over runs
  if (!meet_all(300, 128)) return;
  auto& groups = head()->groups;
  for (; groups.size() > (size_t)(lateness == 0 ? 0 : N); groups.pop_front())
    for (auto& one : groups.front()) one();
}
static void load_nibbles(u32& x, u32 at, int always) {
  if (always) memcpy(&x, shared_at(me->cta, at, 4), 4);
}
struct Lane { u32 at; u32 x[4]; };
static std::map<std::pair<Cta*, int>, std::vector<Lane>> lanes;
static void store_matrix(u32 at, u32 a, u32 b, u32 c, u32 d) {
  auto& l = lanes[{me->cta, (int)me->tid.x / 32}];
  l.resize(32);
  l[me->tid.x % 32] = {at, {a, b, c, d}};
  if (!meet_all(500, 32)) return;
  for (int i = 0; i < 4; i++)
    for (int t = 0; t < 32; t++)
      for (int e = 0; e < 2; e++) {
        const int r = t / 4, k = t % 4 * 2 + e;
        const u16 v = (u16)(l[t].x[i] >> (16 * e));
        memcpy(shared_at(me->cta, l[8 * i + (C_COL ? k : r)].at + (u32)(C_COL ? r : k) * 2, 2), &v, 2);
      }
}
static void load_matrix(u32 (&x)[4], u32 at) {
  auto& l = lanes[{me->cta, (int)me->tid.x / 32}];
  l.resize(32);
  l[me->tid.x % 32] = {at, {}};
  meet_all(600, 32);  // all lanes have said where their row is
  for (int i = 0; i < 4; i++) {
    x[i] = 0;
    for (u32 e = 0; e < 2; e++) {
      const u32 r = me->tid.x % 32 / 4, k = me->tid.x % 4 * 2 + e;
      u16 v;
      memcpy(&v, shared_at(me->cta, l[8 * i + (C_COL ? k : r)].at + (C_COL ? r : k) * 2, 2), 2);
      x[i] |= (u32)v << (16 * e);
    }
  }
  meet_all(700, 32);  // all have read
}
static void __syncwarp() { meet_all(800, 32); }
static u32 round_pair(float lower, float upper) { return (u32)to16(upper) << 16 | to16(lower); }
static float widen(u16 x) { return from16(x); }
static float exp2_of(float x) { return std::exp2(x); }
static float inverse(float x) { return 1.f / x; }
static float tanh_of(float x) { return std::tanh(x); }
static u32 cluster_rank() { return (u32)me->cta->rank; }
static void give_registers() {}
static void take_registers() {}

#else  // ------------------------------------------------------------------------------------------- runs a launch

static const TensorMap *g_a, *g_b, *g_c, *g_other;
static const Params* g_p;
static void thread_main() {
  semi24_kernel(*g_a, *g_b, *g_c, *g_p, *g_other);
  me->done = true;
  swapcontext(&me->at, &scheduler);
}
static Cta* cta_of(int rank, unsigned block, std::vector<Fiber*>& all) {
  Cta* c = new Cta;
  c->smem.assign(SMEM_BYTES, 0x7f), c->rank = rank, c->block = block;
  for (int t = 0; t < THREADS; t++) {
    Fiber* f = new Fiber;
    f->stack.resize(1 << 16), f->cta = c, f->tid = {(unsigned)t, 0, 0};
    getcontext(&f->at);
    f->at.uc_stack.ss_sp = f->stack.data(), f->at.uc_stack.ss_size = f->stack.size(), f->at.uc_link = nullptr;
    makecontext(&f->at, thread_main, 0);
    c->fibers.push_back(f), all.push_back(f);
  }
  return c;
}
static void run(std::vector<Fiber*>& all) {
  for (size_t left = all.size(); left && trouble.empty();) {
    bool moved = false;
    const size_t start = rng() % all.size();
    for (size_t i = 0; i < all.size() && trouble.empty(); i++) {
      Fiber* f = all[(start + i) % all.size()];
      if (f->done || (f->ready && !f->ready())) continue;
      moved = true;
      if (lateness == 1 && f->tid.x % 32 == 0 && rng() % 3 == 0) continue;  // some lag behind
      me = f;
      swapcontext(&scheduler, &f->at);
      if (!f->done) continue;
      left--;
      if (!f->stores.empty() || !f->open_stores.empty()) fail("left before its stores");
    }
    if (!in_flight.empty() && (!moved || (lateness == 1 && rng() % 4 == 0))) {  // loads land late, or at random
      const size_t i = lateness == 1 ? rng() % in_flight.size() : in_flight.size() - 1;
      Action f = in_flight[i];
      in_flight.erase(in_flight.begin() + (long)i);
      f(), moved = true;
    }
    if (!moved) fail("deadlock");
  }
}
// All clusters, one after the other. What went wrong, or "".
extern "C" const char* launch(const TensorMap* a, const TensorMap* b, const TensorMap* c, const Params* p,
                              const TensorMap* other, int ctas, int seed, int late, i64 bytes) {
  g_a = a, g_b = b, g_c = c, g_p = p, g_other = other, grid = (unsigned)ctas, lateness = late, nibbles_bytes = bytes;
  nibbles_from = (const char*)p->nibbles;
  rng.seed((unsigned)seed), trouble.clear();
  for (int first = 0; first < ctas && trouble.empty(); first += CLUSTER) {
    cluster.clear(), in_flight.clear(), handed.clear(), lanes.clear(), cluster_meet = Rendezvous();
    std::vector<Fiber*> all;
    for (int r = 0; r < CLUSTER; r++) cluster.push_back(cta_of(r, (unsigned)(first + r), all));
    run(all);
    if (!in_flight.empty()) fail("loads in flight at the end");
    for (Cta* each : cluster) for (auto& b : each->barriers) if (b.second.tx) fail("bytes missing at the end");
    for (Fiber* f : all) delete f;
    for (Cta* each : cluster) delete each;
  }
  return trouble.c_str();
}
#endif
