// The PTX wrappers of hopper_skinny_24.cu on a CPU. Threads are fibers; copies land at once, or when they are waited for.
// hopper_skinny_24_emulated.py includes this in place of the wrappers, and once more behind the roles, with RUNS defined.
#ifndef RUNS
#include <cmath>
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
#define __grid_constant__
#define __cluster_dims__(...)
#define __launch_bounds__(...)
using std::max; using std::min;

struct Dim { unsigned x; };
struct Meet { int arrived = 0; unsigned generation = 0; };
struct Operands { Quad a, b; u32 meta; };
struct Cta { std::vector<u8> smem; int rank; unsigned block; std::map<int, Meet> meets; std::vector<Operands> handed[2]; std::vector<const u8*> rows[2]; };
struct Fiber {
  ucontext_t at; std::vector<char> stack; Cta* cta; Dim tid; bool done = false; unsigned products = 0, reads = 0;
  std::function<bool()> ready;  // null: may run
  std::deque<std::vector<std::function<void()>>> groups; std::vector<std::function<void()>> open;
};
static std::vector<Cta*> cluster; static Meet cluster_meet; static Fiber* me; static ucontext_t scheduler;
static std::string trouble; static int lateness; static std::mt19937 rng; static const Params* g_p;
static Dim block_of() { return {me->cta->block}; }
#define threadIdx (me->tid)
#define blockIdx (block_of())
static void fail(const char* why) { if (trouble.empty()) trouble = why; }
static void meet(Meet& m, int n) {
  const unsigned g = m.generation;
  if (++m.arrived == n) { m.arrived = 0, m.generation++; return; }
  me->ready = [&m, g] { return m.generation != g; };
  swapcontext(&me->at, &scheduler);
  me->ready = nullptr;
}
static float __fdividef(float x, float y) { return x / y; }
#define __expf std::exp
static u32 halves(u32 x, u32 y, int high) { return high ? x >> 16 | (y & 0xffff0000) : (x & 0xffff) | y << 16; }
static u8* shared_memory() { return me->cta->smem.data(); }
static void warp_sync() { meet(me->cta->meets[1 + (int)me->tid.x / 32], 32); }
static int cluster_rank() { return me->cta->rank; }
static void cluster_sync() { meet(cluster_meet, PARTS * THREADS); }
static float of_peer(const float* at, int rank) {
  float x;
  memcpy(&x, cluster[rank]->smem.data() + ((const u8*)at - me->cta->smem.data()), 4);
  return x;
}
static bool holds(const void* whole, i64 bytes, const u8* from) { return from >= (const u8*)whole && from + 16 <= (const u8*)whole + bytes; }
static void copy16(void* to, const u8* from) {
  const u8* inside = me->cta->smem.data();
  const Params& p = *g_p;
  if ((u8*)to < inside || (u8*)to + 16 > inside + SMEM_BYTES || ((u8*)to - inside) % 16) fail("copy to a wrong place");
  const bool known = holds(p.values, (i64)p.m * p.k, from) || holds(p.meta, (i64)p.m * (p.k / 8), from) ||
                     holds(p.b, 2 * ((p.n - 1) * p.sb_n + p.k), from);
  if (!known || (i64)from % 16) fail("copy from a wrong place");
  if (!trouble.empty()) return;
  auto f = [=] { memcpy(to, from, 16); };
  if (lateness) me->open.push_back(f);
  else f();
}
static void commit_copies() { me->groups.push_back(std::move(me->open)), me->open.clear(); }
template <int N> static void wait_copies() {
  for (; me->groups.size() > N; me->groups.pop_front()) for (auto& f : me->groups.front()) f();
}
// Eight rows in a row must lie in all 32 banks.
static Quad load_matrices(const u8* at) {
  auto& all = me->cta->rows[me->reads++ % 2];
  all.resize(THREADS);
  all[me->tid.x] = at;
  warp_sync();
  const int lane = (int)me->tid.x % 32;
  const u8** of = all.data() + ((int)me->tid.x - lane);
  Quad q;
  for (int i = 0, banks = 0; i < 4; i++, banks = 0) {
    for (int r = 0; r < 8; r++) banks |= 1 << (i64)(of[8 * i + r] - me->cta->smem.data()) / 16 % 8;
    if (banks != 255) fail("matrices in few banks");
    memcpy(&q.x[i], of[8 * i + lane / 4] + lane % 4 * 4, 4);
  }
  return q;
}
static u16 rounded(float x) {
  if (HALF) { const _Float16 h = (_Float16)x; u16 y; memcpy(&y, &h, 2); return y; }
  if (x != x) return 0x7fff;
  u32 u; memcpy(&u, &x, 4);
  return (u16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static float widen(u16 x) {
  if (HALF) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
  const u32 u = (u32)x << 16; float y; memcpy(&y, &u, 4);
  return y;
}
static float half_of(u32 pair, int i) { return widen((u16)(pair >> 16 * i)); }
// Source: PTX ISA, fragments and metadata of mma.sp.m16n8k32 in 16 bits. A warp is at most one product ahead of a lane.
template <int SEL> static void mma(float (&d)[4], const Quad& a, const Quad& b, u32 meta) {
  auto& all = me->cta->handed[me->products++ % 2];
  all.resize(THREADS);
  all[me->tid.x] = {a, b, meta};
  warp_sync();
  const Operands* of = all.data() + me->tid.x / 32 * 32;
  const int g = (int)me->tid.x % 32 / 4, t = (int)me->tid.x % 4;
  for (int i = 0; i < 4; i++)
    for (int stored = 0; stored < 16; stored++) {
      const int high = i / 2, n = 2 * t + i % 2;
      const u32 nibbles = of[4 * g + 2 * SEL + stored / 8].meta >> 16 * high, nibble = nibbles >> 4 * (stored / 2 % 4) & 15;
      if ((nibble & 3) >= nibble >> 2) fail("malformed nibble");
      const int k = stored / 2 * 4 + (stored % 2 ? nibble >> 2 : nibble & 3);
      const float value = half_of(of[4 * g + stored % 8 / 2].a.x[stored / 8 * 2 + high], stored % 2);
      d[i] += value * half_of(of[4 * n + k % 8 / 2].b.x[k / 8], k % 2);
    }
}

#else  // ------------------------------------------------------------------------------------------- runs a launch

static void thread_main() {
  semi24_skinny_kernel(*g_p);
  me->done = true;
  swapcontext(&me->at, &scheduler);
}
static void run(std::vector<Fiber*>& all) {
  for (size_t left = all.size(); left && trouble.empty();) {
    bool moved = false;
    const size_t start = rng() % all.size();
    for (size_t i = 0; i < all.size() && trouble.empty(); i++) {
      Fiber* f = all[(start + i) % all.size()];
      if (f->done || (f->ready && !f->ready())) continue;
      moved = true;
      if (lateness && f->tid.x < 32 && rng() % 64) continue;  // the first warp lags behind
      me = f;
      swapcontext(&scheduler, &f->at);
      left -= f->done;
    }
    if (!moved) fail("deadlock");
  }
}
// All clusters, one after the other. What went wrong, or "".
extern "C" const char* launch(const Params* p, int ctas, int seed, int late) {
  g_p = p, lateness = late, rng.seed((unsigned)seed), trouble.clear();
  for (int first = 0; first < ctas && trouble.empty(); first += PARTS) {
    cluster.clear(), cluster_meet = Meet();
    std::vector<Fiber*> all;
    for (int r = 0; r < PARTS; r++) {
      Cta* c = new Cta;
      c->smem.assign(SMEM_BYTES + 16, 0xff), c->rank = r, c->block = (unsigned)(first + r), cluster.push_back(c);
      for (int t = 0; t < THREADS; t++) {
        Fiber* f = new Fiber;
        f->stack.resize(1 << 16), f->cta = c, f->tid = {(unsigned)t};
        getcontext(&f->at);
        f->at.uc_stack.ss_sp = f->stack.data(), f->at.uc_stack.ss_size = f->stack.size(), f->at.uc_link = nullptr;
        makecontext(&f->at, thread_main, 0);
        all.push_back(f);
      }
    }
    run(all);
    for (Fiber* f : all) delete f;
    for (Cta* c : cluster) delete c;
  }
  return trouble.c_str();
}
#endif
