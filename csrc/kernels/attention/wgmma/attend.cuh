// Hopper's attention kernel, the warps that compute, and all together.
//
// A persistent block of threads takes one tile of the output after the other, as a counter hands them out, or two blocks of a cluster
// take one together, each half of its rows. One warp takes tiles and loads their Q, one loads K (INT8, from quant_k_int8), one V (as
// the caller left it), by the copy engine; a pair of blocks reads each once. Under a mask these know which tiles of keys are seen, and
// one warp more fetches what is added to their scores. Three warpgroups (two at head_dim 256) compute, 64 rows each: while one's
// products run on the tensor cores the others do their softmax, and within each the P V of one block of keys runs beside the softmax of
// the next.
#pragma once

#include "kernels/attention/wgmma/load.cuh"
#include "kernels/attention/wgmma/mask.cuh"
#include "kernels/attention/wgmma/parts.cuh"
#include "kernels/attention/wgmma/quantise_q.cuh"
#include "kernels/attention/wgmma/row_sums.cuh"
#include "kernels/attention/wgmma/softmax.cuh"
#include "kernels/attention/wgmma/store_out.cuh"
#include "kernels/attention/wgmma/store_packed.cuh"
#include "kernels/ptx/bar.cuh"
#include "kernels/ptx/cluster.cuh"
#include "kernels/ptx/setmaxnreg.cuh"
#include "kernels/ptx/shared.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace sage {

template <bool Masked, bool Packed>
__device__ __forceinline__ void consume(const Config::Params& p, const Memory& shared) {
  // The same in all lanes, which the compiler knows of a shuffle's result: what derives from it takes uniform registers.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int group = warp / 4 - 1;
  const int lane = threadIdx.x % 32;
  const int warp_row = warp * 16 - 64;  // in the block's kBlockM rows
  const ptx::Descriptor q_descriptor =
      ptx::wgmma_descriptor<Config::kKRowBytes>(shared.address + Shared::kQInt8 + group * 64 * Config::kKRowBytes);
  // Of the ring's stage.
  ptx::Descriptor k_descriptor = ptx::wgmma_descriptor<Config::kKRowBytes>(shared.address + Shared::kK);
  ptx::Descriptor v_descriptor = ptx::wgmma_descriptor_rows_along_n<Config::kVPanelBytes>(shared.address + Shared::kV);
  Queries q;
  Scores scores;
  Probabilities probabilities;
  Output out;
  Rows rows;
  Stages ring;
  uint32_t turns = 0;  // the parities: of tiles of the output, and of what the mask adds
  int lane_group = lane % 4;  // read from the special register once
  ptx::keep(lane_group);

  uint32_t ready = 0;  // the next stage was seen to be full: asked early, the answer costs no time
  const auto wait_full = [&] {
    ptx::mbarrier_wait_unless(ready, shared.address + Shared::kFull + ring.place * 8, ring.parity);
    ready = 0;
  };
  const auto ask_for_next = [&] {
    Stages next = ring;
    next.next();
    ready = ptx::mbarrier_test(shared.address + Shared::kFull + next.place * 8, next.parity);
  };
  const auto next_stage = [&] {
    ring.next();
    k_descriptor.low += Config::kStageBlocks * Config::kKBlockBytes / 16;
    v_descriptor.low += Config::kStageBlocks * Config::kVBlockBytes / 16;
    if (ring.place == 0) {
      k_descriptor.low -= Config::kStages * Config::kStageBlocks * Config::kKBlockBytes / 16;
      v_descriptor.low -= Config::kStages * Config::kStageBlocks * Config::kVBlockBytes / 16;
    }
  };
  // Each block of the cluster writes to the stages of all. What tensor cores read there a warp has waited for, so that a lane for each block may arrive
  // for all of it; what lanes read, which is what a mask says of keys, each has read for itself.
  bool releases = true;
  uint32_t empty = shared.address + Shared::kEmpty;
  if constexpr (!Masked) {
    releases = lane < ptx::cluster_size();
    empty = ptx::cluster_address(empty, releases ? lane : 0);
  }
  const auto leave_stage = [&] {
    if constexpr (Masked) {
      ptx::mbarrier_arrive(empty + ring.place * 8);
      if (ptx::cluster_size() > 1) ptx::mbarrier_arrive_at(ptx::cluster_address(empty + ring.place * 8, ptx::cluster_rank() ^ 1));
    } else {
      __syncwarp();
      if (releases) ptx::mbarrier_arrive_at(empty + ring.place * 8);
    }
    next_stage();
  };
  uint32_t scales = 0;  // where the stage's lie in their ring
  // Lanes read them, so each arrives for itself, once it has read those of half a ring.
  const auto leave_scales = [&] {
    if constexpr (!Masked) {
      scales = (scales + Config::kScaleStageBytes) % Config::kScaleRingBytes;
      if (scales % (Config::kScaleRingBytes / 2) == 0) ptx::mbarrier_arrive(shared.address + Shared::kScalesEmpty);
    }
  };
  // The products with the stage's K or V of this index.
  const auto start_qk = [&](int index) {
    ptx::wgmma_hold(scores);
    ptx::wgmma_hold(out);
    ptx::wgmma_fence();
    const ptx::Descriptor k = k_descriptor + index * (Config::kKBlockBytes / 16);
#pragma unroll
    for (int step = 0; step < Config::kQkSteps; ++step) {
      // Rows wider than 128 bytes are cut into panels.
      const ptx::Descriptor k_step = k + step / 4 * (Config::kBlockN * 128 / 16) + step % 4 * 2;
      if constexpr (Config::kKeepQ) {
        ptx::wgmma_s8_s8(scores, q[step], k_step, step > 0);
      } else {
        ptx::wgmma_s8_s8(scores, q_descriptor + step / 4 * (Config::kBlockM * 128 / 16) + step % 4 * 2, k_step, step > 0);
      }
    }
    ptx::wgmma_commit();
  };
  const auto start_pv = [&](int index) {
    const ptx::Descriptor v = v_descriptor + index * (Config::kVBlockBytes / 16);
#pragma unroll
    for (int step = 0; step < Config::kPvSteps; ++step) {
      // 16 rows of 128 bytes further.
      ptx::wgmma_f32<Config::Element>(out, probabilities[step], v + step * (16 * 128 / 16));
    }
    ptx::wgmma_commit();
    if constexpr (!Config::kHalfRange) add_to_sums<Config::Element>(probabilities, rows.sum);
  };
  const auto finish_pv = [&] {
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(out);
  };
  // All warps of a group wait for their products or none does, as the PTX ISA asks. So where bases rise while the output is under way, it is
  // rescaled once it is there anyway. Under a mask there are no registers for that: the group decides together, and waits at once.
  const auto any_together = [&](bool predicate) {
    if constexpr (Masked) predicate = ptx::named_barrier_any(1 + group, 128, predicate);
    return __any_sync(0xffffffffu, predicate) != 0;  // of which the compiler knows that all lanes have it
  };

  while (true) {
    ptx::mbarrier_wait(shared.address + Shared::kQFull, turns & 1);
    const Work& work = work_of(turns & 1, shared);
    const auto same = [](int value) { return __shfl_sync(0xffffffffu, value, 0); };
    const int qo_len = same(work.qo_len);
    if (qo_len == 0) return;
    const int kv_len = same(work.kv_len);
    const int first_row = same(work.row<Packed>(group));  // of this warpgroup
    const bool has_rows = first_row < qo_len;
    const auto put = [&] {
      if constexpr (Config::kKeepQ) return;
      if (has_rows) store_queries(q, warp_row, shared);
      ptx::proxy_async_fence();
      ptx::named_barrier(1 + group, 128);
    };
    // Log-sum-exp wants what the first time finds beside; for wider heads, which find it again, there are no registers.
    const bool rotated_anyway = Config::kKeepQ && p.lse == nullptr && same(work.known_rotated);
    if (has_rows && !rotated_anyway) quantise_q<Masked, false>(p, work, first_row, warp_row, shared, q, rows);
    put();
    if (has_rows) {
      wait_full();
      // Where K has been rotated: as it was; once more, unless that was known and enough.
      if (__builtin_expect(same(work.rotated), 0)) {
        ptx::grid_dependency_wait();
        quantise_q<Masked, true>(p, work, first_row, warp_row, shared, q, rows);
        put();
      }
    }
    ptx::mbarrier_arrive(shared.address + Shared::kQEmpty);
    turns ^= 1;
    // Tiles of keys that some row of the cluster sees, that some row of this warpgroup sees, and of which all its rows see every key.
    const int all_blocks = same(work.key_blocks());
    const int blocks = p.causal && !Masked ? min(all_blocks, first_row / 64 + 1) : all_blocks;
    const int full_blocks = (p.causal ? min(kv_len, first_row + 1) : kv_len) / Config::kBlockN;
    int stages_left = all_blocks / Config::kStageBlocks + 1;

    const float* q_reach = shared.at<float>(Shared::kQReach) + warp_row + lane / 4;
    const auto k_scales = [&](int index) {
      if constexpr (Masked) return shared.at<float>(Shared::kKScale + (ring.place * Config::kStageBlocks + index) * Config::kScaleBytes) + lane_group;
      else return shared.at<float>(Shared::kScaleRing + scales + index * Config::kScaleBytes) + lane_group;
    };
    // What the mask says of the stage's block of keys of this index.
    const auto seen_of = [&](int index) -> const SeenTile& {
      return *shared.at<SeenTile>(Shared::kSeen + (ring.place * Config::kStageBlocks + index) * Config::kSeenBytes);
    };
    const auto softmax = [&](int block, int index, uint32_t seen, float k_scale, bool bounded, Rescaling& rescaling) {
      ptx::wgmma_hold(scores);
      const int state = Masked ? seen_of(index).state(group) : 0;
      float largest[2], sums[2];
      const auto any_grows = [&](bool grows) {
        if (!any_together(grows)) return false;
        if constexpr (Masked) finish_pv();
        return true;
      };
      const auto any_too_large = [&](bool too_large) {
        if constexpr (Masked) finish_pv();
        return __any_sync(0xffffffffu, too_large) != 0;
      };
      const auto rescale = [&](int row, float factor) {
        if constexpr (Masked) rescale_row(row, factor, out);
        else rescaling.add(row, factor);
      };
      if (Masked && state == AttentionMask::kAdded) {
        ptx::mbarrier_wait(shared.address + Shared::kAddedFull + group * 8, turns >> 1);
        turns ^= 2;
        float log2[2];
        add_mask(p, shared, group, seen, k_scale, rows, scores, log2);
        find_largest_of_floats(scores, log2, largest);
        raise_bases(largest, q_reach, rows, any_grows, rescale);
        make_probabilities_of_floats(shared, rows, scores, sums);
      } else {
        const bool some_hidden = Masked ? state != AttentionMask::kVisible : block >= full_blocks;
        if (some_hidden) {
          if constexpr (Masked) hide(seen, scores);
          else hide_past_end(p.causal, kv_len, block * Config::kBlockN, first_row + warp % 4 * 16, scores);
        }
        if (!bounded) {
          find_largest(scores, k_scale, rows, largest);
          raise_bases(largest, q_reach, rows, any_grows, rescale);
        }
        if (some_hidden) make_probabilities<true>(scores, k_scale, rows, sums);
        else make_probabilities<false>(scores, k_scale, rows, sums);
        if constexpr (Config::kHalfRange) lower_probabilities(q_reach, scores, sums, rows, any_too_large, rescale);
      }
      if constexpr (Config::kHalfRange) {
#pragma unroll
        for (int row = 0; row < 2; ++row) rows.sum[row] += sums[row];
      }
    };
    // The scores of a block of keys and the output of the one before; then, while the output is under way, the block's probabilities.
    const auto step = [&](int block, int index) {
      start_qk(index);
      start_pv(index);
      const uint32_t seen = Masked ? seen_scores(p, work, group, seen_of(index)) : 0;
      const float k_scale = k_scales(index)[0], k_bound = k_scales(index)[QuantKInt8::kGroups];
      const bool bounded = !any_together(!(k_bound <= rows.k_limit));
      if (index == Config::kStageBlocks - 1) leave_scales();
      ptx::wgmma_wait<1>();
      if (!Masked && index == Config::kStageBlocks - 1) ask_for_next();
      Rescaling rescaling;
      softmax(block, index, seen, k_scale, bounded, rescaling);
      finish_pv();
      rescaling.apply(out);
    };

    if (has_rows) {
      start_qk(0);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        rows.base[row] = -INFINITY;
        rows.sum[row] = 0.0f;
      }
      rows.k_limit = -INFINITY;
#pragma unroll
      for (int i = 0; i < Config::kHeadDim / 2; ++i) out[i] = 0.0f;
      const uint32_t first_seen = Masked ? seen_scores(p, work, group, seen_of(0)) : 0;
      const float k_scale = *k_scales(0);
      if (Config::kStageBlocks == 1) leave_scales();
      ptx::wgmma_wait<0>();
      if (Config::kStageBlocks == 1) ask_for_next();
      Rescaling none;  // of an output of zeros
      softmax(0, 0, first_seen, k_scale, false, none);
      pack(scores, probabilities);
      // Where a stage holds two blocks, odd ones are its second, and even ones the next stage's first.
      int block = 1;
#pragma unroll 1
      while (true) {
        if constexpr (Config::kStageBlocks == 2) {
          if (block == blocks) break;
          step(block++, 1);
        }
        leave_stage();
        if constexpr (Config::kStageBlocks == 2) pack(scores, probabilities);
        wait_full();
        if (block == blocks) break;
        step(block++, 0);
        pack(scores, probabilities);
      }
      ptx::wgmma_hold(out);
      ptx::wgmma_fence();
      start_pv(blocks % Config::kStageBlocks);
      finish_pv();
      leave_scales();
      leave_stage();
      stages_left -= blocks / Config::kStageBlocks + 1;
      if constexpr (Packed) {
        store_packed(p, work, work.row<Packed>(group) + threadIdx.x % 128 / 32 * 16, warp_row, rows, out, shared);
      } else if (Masked || work.parts == 1 || add_parts(p, work, warp - 4, rows, out)) {
        store_out<!Masked>(p, work, work.row<Packed>(group) + threadIdx.x % 128 / 32 * 16, warp_row, rows, out, shared);
      }
    }
    // Other warpgroups and the other block may see more keys.
    for (; stages_left > 0; --stages_left) {
      wait_full();
      leave_scales();
      leave_stage();
    }
    // Before the next tile's Q overwrites what slower warps of the group still read of this one's.
    if constexpr (!Config::kKeepQ) ptx::named_barrier(1 + group, 128);
  }
}

template <bool Masked, bool Packed>
__device__ __forceinline__ void attend(const Config::Params& p) {
  uint8_t* unaligned = ptx::dynamic_shared();
  Memory shared;
  shared.pointer = unaligned + (1024 - ptx::shared_address(unaligned) % 1024) % 1024;
  shared.address = ptx::shared_address(shared.pointer);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(shared.address + Shared::kQFull, 1);
    ptx::mbarrier_init(shared.address + Shared::kQEmpty, 32 * (Config::kConsumerWarps + (Masked ? 3 : 2)));  // and those that load
    ptx::mbarrier_init(shared.address + Shared::kLastV, 1);
    ptx::mbarrier_init(shared.address + Shared::kNearEnd, 1);
    ptx::mbarrier_init(shared.address + Shared::kIndexFull, 1);
    ptx::mbarrier_init(shared.address + Shared::kIndexEmpty, 1);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(shared.address + Shared::kFull + stage * 8, 2);  // K's and V's warps
      ptx::mbarrier_init(shared.address + Shared::kEmpty + stage * 8, (Masked ? 32 : 1) * Config::kConsumerWarps * ptx::cluster_size());
    }
    if (!Masked) ptx::mbarrier_init(shared.address + Shared::kScalesEmpty, 32 * Config::kConsumerWarps);
    for (int group = 0; Masked && group < Config::kConsumers; ++group) {
      ptx::mbarrier_init(shared.address + Shared::kAddedFull + group * 8, 1);
      ptx::mbarrier_init(shared.address + Shared::kAddedEmpty + group * 8, 4 * 32);
    }
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_sync_relaxed();
  if (threadIdx.x < 128) {
    ptx::registers_release<Config::kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) load_k<Masked, Packed>(p, shared);
    else if (warp == 1) load_v<Masked, Packed>(p, shared);
    else if (warp == 2) hand_out<Masked, Packed>(p, shared);
    else if (Masked) fetch_added(p, shared);
  } else {
    ptx::registers_acquire<Config::kConsumerRegisters>();
    if (p.lse != nullptr) ptx::grid_dependency_wait();  // for K's mean
    consume<Masked, Packed>(p, shared);
  }
  ptx::cluster_sync();  // a block's shared memory is there until no other's arrival is on the way to it
}

}  // namespace sage
