// Chooses the next token of each row of logits on a CPU. The twin is
// disagg/kernels/torch/sampling.py, which is the specification; the tables and the columns of
// `numbers` are those of disagg/kernels/sampling_rows.py. `disagg/kernels/cpu/sampling.py` calls the
// plain C interface at the end. It needs no special instruction set: the compiler makes one version of
// the loops for each generation of CPUs.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int64_t GROUP = 256;
constexpr int LANES = 16;
constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int64_t NONE = -1;  // instead of a token id
constexpr uint64_t FIRST_GROUP_COUNTER = uint64_t(1) << 32;
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9;
constexpr uint64_t MIX_2 = 0x94D049BB133111EB;
constexpr double SLACK = 1e-3;  // margin of a bound that only excludes tokens that cannot be kept

enum Column { SEED, TOP_K, MIN_TOKENS, TEMPERATURE, TOP_P, REACH, REPETITION, PRESENCE, FREQUENCY };
constexpr int NUM_COLUMNS = 9;

struct Tables {
  const int64_t* numbers;   // [num_slots, NUM_COLUMNS]; from TEMPERATURE on bits of float64
  const int32_t* stop_ids;  // [num_slots, num_stop_ids]
  int32_t* seen_ids;        // [num_slots, seen_width]
  int32_t* num_seen;        // [num_slots]
  int32_t* counts;          // [num_slots, vocab]
  int64_t num_stop_ids, seen_width, vocab;
};

double float_of(const int64_t* numbers, Column column) {
  double value;
  memcpy(&value, numbers + column, sizeof value);
  return value;
}

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * MIX_1;
  x = (x ^ (x >> 27)) * MIX_2;
  return x ^ (x >> 31);
}

double gumbel(uint64_t key, uint64_t counter) {
  const uint64_t bits = mix(key + (counter + 1) * GOLDEN) >> 32;
  return -log(-log((double(bits) + 0.5) / 4294967296.0));
}

// exp(x) for x <= 0, to a few units in the last place; tiny for x far below 0. (From Cephes.)
INLINE float exp_below(float x) {
  x = x < -87.0f ? -87.0f : x;
  const int power = int(x * 1.44269504f - 0.5f);
  x -= float(power) * 0.693359375f;
  x -= float(power) * -2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * x + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  y = y * x * x + x + 1.0f;
  const int32_t bits = (power + 127) << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return y * scale;
}

// The index of the largest number, where NaN is larger than all; the first one if several are equal.
// NONE if the largest is not finite.
int64_t most_likely(const float* x, int64_t size) {
  int64_t place = 0;
  float largest = x[0];
  for (int64_t i = 1; i < size && !std::isnan(largest); i++)
    if (!(x[i] <= largest)) largest = x[i], place = i;
  return std::isfinite(largest) ? place : NONE;
}

// Divides a row in place, and finds the largest number of each group; NaN if any is NaN.
FOR_EACH_PROCESSOR
void scale(float* x, int64_t size, float temperature, float* peaks) {
  for (int64_t first = 0; first < size; first += GROUP) {
    const int64_t end = std::min(first + GROUP, size), even = end - (end - first) % LANES;
    float most[LANES];
    int32_t num_nans[LANES] = {};
    for (float& lane : most) lane = NEVER;
    for (int64_t i = first; i < even; i += LANES) {
      for (int lane = 0; lane < LANES; lane++) {
        const float value = x[i + lane] / temperature;
        x[i + lane] = value;
        most[lane] = value > most[lane] ? value : most[lane];
        num_nans[lane] += value != value;
      }
    }
    for (int64_t i = even; i < end; i++) {
      x[i] /= temperature;
      most[0] = x[i] > most[0] ? x[i] : most[0];
      num_nans[0] += x[i] != x[i];
    }
    const bool has_nan = std::any_of(num_nans, num_nans + LANES, [](int32_t num) { return num > 0; });
    peaks[first / GROUP] = has_nan ? NAN : *std::max_element(most, most + LANES);
  }
}

// The sum of exp(x - peak) over the kept tokens of a group.
FOR_EACH_PROCESSOR
float total_of(const float* x, int64_t size, float peak, float floor) {
  float totals[LANES] = {};
  const int64_t even = size - size % LANES;
  for (int64_t i = 0; i < even; i += LANES) {
    for (int lane = 0; lane < LANES; lane++) {
      const float value = x[i + lane];
      totals[lane] += value >= floor ? exp_below(value - peak) : 0.0f;
    }
  }
  float total = 0.0f;
  for (int64_t i = even; i < size; i++) total += x[i] >= floor ? exp_below(x[i] - peak) : 0.0f;
  for (float lane : totals) total += lane;
  return total;
}

class Row {
 public:
  Row(float* x, int64_t vocab, std::vector<float>& peaks, std::vector<float>& some)
      : x_(x), vocab_(vocab), num_groups_((vocab + GROUP - 1) / GROUP), peaks_(peaks), some_(some) {}

  int64_t draw(const int64_t* numbers, int64_t position) {
    peaks_.resize(num_groups_);
    scale(x_, vocab_, float(float_of(numbers, TEMPERATURE)), peaks_.data());
    const int64_t highest = most_likely(peaks_.data(), num_groups_);
    if (highest == NONE) return NONE;
    peak_ = peaks_[highest];
    const float floor = floor_of(numbers);
    const uint64_t key = mix(uint64_t(numbers[SEED]) + uint64_t(position) * GOLDEN);
    int64_t group = 0;
    double best = -std::numeric_limits<double>::infinity();
    for (int64_t g = 0; g < num_groups_; g++) {
      if (!(peaks_[g] > NEVER) || peaks_[g] < floor) continue;
      const float total = total_of(x_ + g * GROUP, size_of(g), peaks_[g], floor);
      const double weight = float(double(peaks_[g]) + log(double(total)));
      const double score = weight + gumbel(key, uint64_t(g) + FIRST_GROUP_COUNTER);
      if (score > best) best = score, group = g;
    }
    int64_t chosen = group * GROUP;
    best = -std::numeric_limits<double>::infinity();
    for (int64_t i = group * GROUP; i < group * GROUP + size_of(group); i++) {
      if (!(x_[i] > NEVER) || x_[i] < floor) continue;
      const double score = double(x_[i]) + gumbel(key, uint64_t(i));
      if (score > best) best = score, chosen = i;
    }
    return chosen;
  }

 private:
  int64_t size_of(int64_t group) const { return std::min(GROUP, vocab_ - group * GROUP); }

  // The smallest scaled logit that min-p, top-k and top-p keep.
  float floor_of(const int64_t* numbers) {
    const float reach = float(float_of(numbers, REACH)), top_p = float(float_of(numbers, TOP_P));
    const int64_t top_k = numbers[TOP_K];
    float floor = peak_ - reach;
    const bool is_limited = top_k < vocab_;
    if (!is_limited && !(top_p < 1.0f)) return floor;
    float bound = floor;  // kept logits are at least this
    double total = 0.0;
    if (is_limited && top_k <= num_groups_) {  // `top_k` groups have a logit of at least:
      some_ = peaks_;
      std::nth_element(some_.begin(), some_.begin() + (top_k - 1), some_.end(), std::greater<>());
      bound = std::max(bound, some_[top_k - 1]);
    } else if (!is_limited && !(reach < std::numeric_limits<float>::infinity())) {
      for (int64_t g = 0; g < num_groups_; g++) {
        if (peaks_[g] > NEVER) total += total_of(x_ + g * GROUP, size_of(g), peak_, NEVER);
      }
      // All tokens less likely than this are together less than the share that top-p omits.
      const double rest = std::max((1.0 - double(top_p)) * total / double(vocab_), 1e-300);
      bound = float(double(peak_) + log(rest) - SLACK);
    }
    take(bound);
    if (is_limited && int64_t(some_.size()) >= top_k) {
      std::nth_element(some_.begin(), some_.begin() + (top_k - 1), some_.end(), std::greater<>());
      floor = std::max(floor, some_[top_k - 1]);
    }
    if (!(top_p < 1.0f)) return floor;
    const auto is_less = [floor](float value) { return value < floor; };
    some_.erase(std::remove_if(some_.begin(), some_.end(), is_less), some_.end());
    if (total == 0.0) total = mass_of(0, some_.size());
    return std::max(floor, value_at(double(top_p) * total));
  }

  double mass_of(size_t first, size_t end) const {
    double mass = 0.0;
    for (size_t i = first; i < end; i++) mass += exp_below(some_[i] - peak_);
    return mass;
  }

  // The smallest of `some_` above which there is less than this mass, found by bisection.
  float value_at(double mass) {
    size_t first = 0, end = some_.size();
    while (end - first > 1) {
      const float a = some_[first], b = some_[first + (end - first) / 2], c = some_[end - 1];
      const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
      const auto begin = some_.begin();
      const auto equal = std::partition(begin + first, begin + end,
                                        [pivot](float value) { return value > pivot; });
      const auto less =
          std::partition(equal, begin + end, [pivot](float value) { return value == pivot; });
      const double above = mass_of(first, equal - begin);
      if (above >= mass && equal - begin > int64_t(first)) {
        end = equal - begin;
        continue;
      }
      const double at = mass_of(equal - begin, less - begin);
      if (above + at >= mass || less == begin + end) return pivot;
      mass -= above + at;
      first = less - begin;
    }
    return some_[first];
  }

  // Collects all logits of at least `bound` in `some_`.
  void take(float bound) {
    some_.clear();
    for (int64_t g = 0; g < num_groups_; g++) {
      if (peaks_[g] < bound || !(peaks_[g] > NEVER)) continue;
      const float* own = x_ + g * GROUP;
      for (int64_t i = 0; i < size_of(g); i++) {
        if (own[i] >= bound && own[i] > NEVER) some_.push_back(own[i]);
      }
    }
  }

  float* x_;
  int64_t vocab_, num_groups_;
  std::vector<float>&peaks_, &some_;
  float peak_ = NEVER;
};

}  // namespace

#define PUBLIC extern "C" __attribute__((visibility("default")))

PUBLIC int32_t disagg_sampling_version() { return 2; }

// As `SamplingOps.adjust_`, for `num` rows.
PUBLIC void disagg_sampling_adjust(float* logits, const Tables* tables, const int64_t* slots,
                                   const int64_t* rows, int64_t num, const int64_t* positions) {
  for (int64_t i = 0; i < num; i++) {
    const int64_t row = rows[i], slot = slots[row], vocab = tables->vocab;
    const int64_t* numbers = tables->numbers + slot * NUM_COLUMNS;
    float* x = logits + row * vocab;
    const double presence = float_of(numbers, PRESENCE), frequency = float_of(numbers, FREQUENCY);
    const float repetition = float(float_of(numbers, REPETITION));
    if (repetition != 1.0f || presence != 0.0 || frequency != 0.0) {
      const int32_t* ids = tables->seen_ids + slot * tables->seen_width;
      for (int32_t seen = 0; seen < tables->num_seen[slot]; seen++) {
        const int32_t count = tables->counts[slot * vocab + ids[seen]] - 1;
        float& score = x[ids[seen]];
        score = score > 0.0f ? score / repetition : score * repetition;
        score -= float(presence * double(count > 0) + frequency * double(count));
      }
    }
    if (positions[row] >= numbers[MIN_TOKENS]) continue;
    const int32_t* stop_ids = tables->stop_ids + slot * tables->num_stop_ids;
    for (int64_t each = 0; each < tables->num_stop_ids; each++) {
      if (stop_ids[each] >= 0 && stop_ids[each] < vocab) x[stop_ids[each]] += NEVER;
    }
  }
}

// As `SamplingOps.choose`, for rows [first, end). Returns 1 if there is not enough memory.
PUBLIC int32_t disagg_sampling_choose(float* logits, const Tables* tables, const int64_t* slots,
                                      const int64_t* positions, int64_t first, int64_t end,
                                      int64_t* token_ids, int64_t* has_none) {
  try {
    std::vector<float> peaks, some;
    for (int64_t row = first; row < end; row++) {
      const int64_t* numbers = tables->numbers + slots[row] * NUM_COLUMNS;
      float* x = logits + row * tables->vocab;
      const int64_t chosen = float_of(numbers, TEMPERATURE) > 0.0
                                 ? Row(x, tables->vocab, peaks, some).draw(numbers, positions[row])
                                 : most_likely(x, tables->vocab);
      has_none[row] = chosen == NONE;
      token_ids[row] = chosen == NONE ? 0 : chosen;
    }
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// As `SamplingOps.remember`, for `num` rows.
PUBLIC void disagg_sampling_remember(const Tables* tables, const int64_t* slots,
                                     const int64_t* token_ids, const int64_t* rows, int64_t num) {
  for (int64_t i = 0; i < num; i++) {
    const int64_t slot = slots[rows[i]], token_id = token_ids[rows[i]];
    int32_t& count = tables->counts[slot * tables->vocab + token_id];
    if (count == 0) {
      tables->seen_ids[slot * tables->seen_width + tables->num_seen[slot]++] = int32_t(token_id);
    }
    count = std::max(count, 1) + 1;
  }
}
