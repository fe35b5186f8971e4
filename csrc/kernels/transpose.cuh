// Words of four rows that four lanes hold, by rows instead of by columns.
#pragma once

namespace sage {

// Lanes `Distance` apart, number 0 to 3, hold word `number` of each of four rows: hands each of them all four words of the row of its number.
template <int Distance>
__device__ __forceinline__ uint4 transpose(const uint32_t (&words)[4], int number) {
  const bool odd = number % 2, high = number / 2;
  const auto exchange = [](uint32_t word, int lane) { return __shfl_xor_sync(0xffffffffu, word, lane); };
  // First between neighbours, then between pairs.
  const uint32_t first = exchange(odd ? words[0] : words[1], Distance), second = exchange(odd ? words[2] : words[3], Distance);
  const uint32_t low[2] = {odd ? first : words[0], odd ? words[1] : first};   // rows 0 or 1: words of this pair
  const uint32_t up[2] = {odd ? second : words[2], odd ? words[3] : second};  // rows 2 or 3
  const uint32_t third = exchange(high ? low[0] : up[0], 2 * Distance), fourth = exchange(high ? low[1] : up[1], 2 * Distance);
  return high ? make_uint4(third, fourth, up[0], up[1]) : make_uint4(low[0], low[1], third, fourth);
}

}  // namespace sage
