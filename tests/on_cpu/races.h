// Which accesses to shared memory are ordered: with SAGE_RACES, and compiled with -fsanitize=thread, whose calls for each access end here instead of in a
// library, an access that another thread's is not ordered with is a failure, whatever the order they came in.
//
// Order is made by what makes it in the PTX ISA: barriers of all kinds, __syncwarp, arrivals and waits, and for what tensor cores and the copy engine
// read of what threads wrote, a proxy fence on the way. Shuffles and votes make none. Arrivals at another block's barrier order what came before
// though their scope is the block: as everybody has it, and reads are all that comes before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace gpu::races {

#ifdef SAGE_RACES

// How far each thread had come, as far as is known; after the threads, how many phases of each barrier had completed.
using Clocks = std::vector<uint32_t>;
inline void join(Clocks& into, const Clocks& other) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

// What is known; and what of it tensor cores and the copy engine would see.
struct Known {
  Clocks by_threads, by_engines;
  void join(const Known& other) {
    races::join(by_threads, other.by_threads);
    races::join(by_engines, other.by_engines);
  }
};

// By way of a barrier: of those who come, and for those who go.
struct Order { Known gathered, given; };

struct Access {
  uint32_t who = 0, when = 0;  // index and value of a clock
  bool by_engine = false;
  const void* where = nullptr;  // in the code
};
struct Cell {
  Access write;
  std::vector<Access> reads;
};

constexpr uint32_t kBarriers = 128;
inline std::vector<Known> known;  // by each thread
inline std::vector<std::vector<Cell>> cells;  // of each block
inline bool ignored;              // what this program itself accesses
inline uint8_t *memory, *end;     // of all blocks
inline uint32_t block_bytes, cell_bytes;
inline void report(const Access& access, bool is_write, const Access& earlier, bool was_write, uint32_t byte);  // ends the launch
inline uint32_t this_thread();

// Threads may write the same number without order. Whether that is so shows once the second one has.
struct Suspicion {
  Access access, earlier;
  const uint8_t* place;  // null: there is none
  uint32_t number;
};
inline Suspicion suspicion;
inline void settle() {
  const Suspicion was = std::exchange(suspicion, {});
  if (was.place != nullptr && std::memcmp(was.place, &was.number, cell_bytes) != 0) report(was.access, true, was.earlier, true, (was.place - memory) % block_bytes);
}

inline Known nothing() { return {Clocks(known.size() + kBarriers), Clocks(known.size() + kBarriers)}; }
inline Order order() { return {nothing(), nothing()}; }

// Each block has `bytes`, `cell` of which are told apart from others.
inline void start(size_t threads, size_t blocks, uint8_t* shared, uint32_t bytes, uint32_t cell) {
  memory = shared;
  end = shared + blocks * bytes;
  block_bytes = bytes;
  cell_bytes = cell;
  ignored = false;
  suspicion = {};
  known.assign(threads, {});
  known.assign(threads, nothing());
  for (size_t i = 0; i < threads; ++i) known[i].by_threads[i] = 1;
  cells.assign(blocks, std::vector<Cell>(bytes / cell));
}

// Comes to a barrier; all have come; goes on.
inline void come(Order& order) {
  const uint32_t thread = this_thread();
  order.gathered.join(known[thread]);
  ++known[thread].by_threads[thread];
}
inline void all_have_come(Order& order) { order.given = std::exchange(order.gathered, nothing()); }
inline void go_on(const Order& order) { known[this_thread()].join(order.given); }
inline void has_completed(uint32_t barrier, uint32_t phases) {
  uint32_t& seen = known[this_thread()].by_threads[known.size() + barrier];
  seen = std::max(seen, phases);
}
inline void proxy_fence() { known[this_thread()].by_engines = known[this_thread()].by_threads; }

inline bool before(const Access& earlier, bool was_write, bool by_engine, const Known& now) {
  const bool needs_fence = by_engine && was_write && !earlier.by_engine;
  return (needs_fence ? now.by_engines : now.by_threads)[earlier.who] >= earlier.when;
}

// Notes an access to bytes of shared memory that knows so much.
inline void note(const uint8_t* address, uint32_t bytes, bool is_write, const Access& access, const Known& now) {
  const size_t offset = address - memory;
  std::vector<Cell>& its = cells[offset / block_bytes];
  const size_t first = offset % block_bytes;
  for (size_t i = first / cell_bytes; i <= (first + bytes - 1) / cell_bytes; ++i) {
    Cell& cell = its[i];
    if (!before(cell.write, true, access.by_engine, now)) {
      if (is_write && !access.by_engine && !cell.write.by_engine) {
        suspicion = {access, cell.write, address - first + i * cell_bytes, 0};
        std::memcpy(&suspicion.number, suspicion.place, cell_bytes);
      } else {
        report(access, is_write, cell.write, true, i * cell_bytes);
      }
    }
    if (!is_write) {
      const auto same = std::find_if(cell.reads.begin(), cell.reads.end(), [&](const Access& read) { return read.who == access.who; });
      if (same == cell.reads.end()) cell.reads.push_back(access);
      else *same = access;
      continue;
    }
    for (const Access& read : cell.reads) {
      if (!before(read, false, access.by_engine, now)) report(access, true, read, false, i * cell_bytes);
    }
    cell.write = access;
    cell.reads.clear();
  }
}

[[gnu::noinline]] inline void note_by_thread(const void* address, uint32_t bytes, bool is_write, const void* where) {
  const uint32_t thread = this_thread();
  ignored = true;
  settle();
  note(static_cast<const uint8_t*>(address), bytes, is_write, {thread, known[thread].by_threads[thread], false, where}, known[thread]);
  ignored = false;
}

// By the copy engine: at once as far as others may see, and done with a phase of a barrier.
inline void note_copy(const uint8_t* destination, uint32_t bytes, uint32_t barrier, uint32_t phases, const void* where) {
  note(destination, bytes, true, {static_cast<uint32_t>(known.size()) + barrier, phases, true, where}, known[this_thread()]);
}

// By tensor cores, for a thread that has waited for them and knew so much when it started them.
inline void note_operand(const uint8_t* source, uint32_t bytes, const Known& then, uint32_t thread, const void* where) {
  note(source, bytes, false, {thread, known[thread].by_threads[thread], true, where}, then);
}

inline Known what_is_known() { return known[this_thread()]; }
[[gnu::noinline]] inline const void* here() { return __builtin_return_address(0); }

#else

struct Known {};
struct Order {};
inline bool ignored;
inline Order order() { return {}; }
inline void start(size_t, size_t, uint8_t*, uint32_t, uint32_t) {}
inline void come(Order&) {}
inline void all_have_come(Order&) {}
inline void go_on(const Order&) {}
inline void has_completed(uint32_t, uint32_t) {}
inline void proxy_fence() {}
inline void note_by_thread(const void*, uint32_t, bool, const void*) {}
inline void note_copy(const uint8_t*, uint32_t, uint32_t, uint32_t, const void*) {}
inline void note_operand(const uint8_t*, uint32_t, const Known&, uint32_t, const void*) {}
inline Known what_is_known() { return {}; }
inline const void* here() { return nullptr; }

#endif

}  // namespace gpu::races
