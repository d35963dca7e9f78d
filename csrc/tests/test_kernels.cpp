// The CUDA kernels under the emulator, against plain loops, with exact-size buffers: run under ASan and UBSan.
#include "emulator.h"

#include "../cuda/gae.h"
#include "../cuda/policy.h"
#include "../cuda/response.h"

#include <cmath>
#include <limits>

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
int failures = 0;
int cases = 0;

#define CHECK(condition, ...)                          \
  do {                                                 \
    if (!(condition)) {                                \
      if (++failures < 10) {                           \
        std::printf("FAILED %s: ", #condition);        \
        std::printf(__VA_ARGS__);                      \
        std::printf("\n");                             \
      }                                                \
    }                                                  \
  } while (0)

// A buffer of exactly its size: one byte too far is an error.
template <class T>
struct Buffer {
  explicit Buffer(size_t size) : data(static_cast<T*>(std::malloc(size * sizeof(T) + (size == 0)))), size(size) {}
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  T& operator[](size_t i) { return data[i]; }
  T* data;
  size_t size;
};

bool close(double got, double wanted, double tolerance) {
  if (std::isnan(wanted) || std::isinf(wanted)) return !std::isfinite(got);
  return std::fabs(got - wanted) <= tolerance * (1 + std::fabs(wanted));
}

struct Shape {
  std::vector<int> lengths;
  double turn;        // mean length of a turn; 0: actions only
  bool garbage;       // NaN and inf at masked positions, and one NaN at an action of one sequence
  double gamma, lambda;
};

template <class T>
void test_gae(const Shape& shape, unsigned seed) {
  ++cases;
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  const int64_t tokens = std::accumulate(shape.lengths.begin(), shape.lengths.end(), 0);
  const int64_t sequences = int64_t(shape.lengths.size());
  if (tokens == 0) return;
  Buffer<T> rewards(tokens), values(tokens), advantages(tokens), returns(tokens), again(tokens), unused(tokens);
  Buffer<uint8_t> mask(tokens);
  Buffer<int32_t> bounds(sequences + 1);
  Buffer<double> lam(sequences), bootstrap(sequences);
  bounds[0] = 0;
  for (int64_t b = 0; b < sequences; ++b) {
    bounds[b + 1] = bounds[b] + shape.lengths[b];
    lam[b] = shape.lambda < 0 ? uniform(random) : shape.lambda;
    bootstrap[b] = normal(random);
  }
  bool action = true;
  for (int64_t t = 0; t < tokens; ++t) {
    if (shape.turn > 0 && uniform(random) < 1 / shape.turn) action = !action;
    mask[t] = action;
    rewards[t] = uniform(random) < 0.3 ? T(normal(random)) : T(0);
    values[t] = T(normal(random));
    if (shape.garbage && !action) {
      values[t] = T(kNan);
      if (uniform(random) < 0.5) rewards[t] = uniform(random) < 0.5 ? T(kNan) : T(INFINITY);
    }
  }
  const int64_t poisoned = shape.garbage && sequences > 2 ? sequences / 2 : -1;
  if (poisoned >= 0) bootstrap[poisoned] = kNan;

  const int64_t tiles = (tokens + megasao::kTile - 1) / megasao::kTile;
  const auto run = [&](T* to_advantages, T* to_returns, unsigned order) {
    Buffer<unsigned> ticket(1), state(tiles);
    Buffer<double> m(tiles), b(tiles), y(tiles);
    ticket[0] = 0;
    for (int64_t i = 0; i < tiles; ++i) state[i] = 0, m[i] = b[i] = y[i] = kNan;
    const megasao::GaeProblem<T> problem = {rewards.data, values.data,    mask.data,     bounds.data,  lam.data, bootstrap.data,
                                            shape.gamma,  tokens, sequences, to_advantages, to_returns};
    const megasao::GaeScratch scratch = {ticket.data, state.data, m.data, b.data, y.data};
    emulator::launch(unsigned(tiles), megasao::kThreads, 3, order, [&] { megasao::gae_kernel(problem, scratch); });
  };
  run(advantages.data, returns.data, seed);

  const double tolerance = sizeof(T) == 4 ? 2e-6 : 1e-10;  // sums of 80,000 terms
  for (int64_t s = 0; s < sequences; ++s) {
    double y = shape.gamma * bootstrap[s];
    for (int64_t t = bounds[s + 1] - 1; t >= bounds[s]; --t) {
      double advantage = 0, total = 0;
      if (mask[t]) {
        total = double(rewards[t]) + y;
        advantage = total - double(values[t]);
        y = shape.gamma * lam[s] * total + shape.gamma * (1 - lam[s]) * double(values[t]);
      } else if (std::isfinite(double(rewards[t]))) {
        y += rewards[t];
      }
      CHECK(close(returns[t], total, tolerance), "gae return at %ld of %ld: %g, not %g", long(t), long(tokens),
            double(returns[t]), total);
      CHECK(close(advantages[t], advantage, tolerance), "gae advantage at %ld of %ld: %g, not %g", long(t),
            long(tokens), double(advantages[t]), advantage);
    }
  }
}

// Whole launches rarely look back over more than the few tiles that run at the same time: this does.
void test_look_back(int tiles, int final_tile, int constant_tile, unsigned seed) {
  ++cases;
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(0.5, 1.5);
  Buffer<unsigned> ticket(1), state(tiles);
  Buffer<double> m(tiles), b(tiles), y(tiles);
  double expected = 0;
  for (int i = 0; i < tiles; ++i) {
    const bool done = i == final_tile || i == constant_tile;
    m[i] = i == constant_tile ? 0 : uniform(random);
    b[i] = uniform(random);
    state[i] = done ? unsigned(megasao::kFinal) : unsigned(megasao::kMap);
    if (i < final_tile) b[i] = kNan;  // must not be used
    expected = i == final_tile ? 3.5 : m[i] == 0 ? b[i] : m[i] * expected + b[i];
    y[i] = done ? expected : kNan;
  }
  double got = kNan;
  const megasao::GaeScratch scratch = {ticket.data, state.data, m.data, b.data, y.data};
  emulator::launch(1, megasao::kWarp, 1, seed, [&] {
    const double found = megasao::look_back(scratch, tiles);
    if (threadIdx.x == 0) got = found;
  });
  CHECK(close(got, expected, 1e-12), "look-back over %d tiles: %g, not %g", tiles, got, expected);
}

// What a token adds, by definition: {weight, loss, low, high, dual}.
struct Expected {
  double weight = 0, loss = 0;
  bool low = false, high = false, dual = false;
};

template <class T>
Expected by_definition(const megasao::DisRule<T>& rule, T log_ratio, double ratio, double advantage, double logprob) {
  Expected e;
  e.low = log_ratio <= rule.lower, e.high = log_ratio >= rule.upper;
  if (!e.low && !e.high) e.weight = ratio * advantage, e.loss = e.weight * logprob;
  return e;
}

template <class T>
Expected by_definition(const megasao::PpoRule<T>& rule, T log_ratio, double ratio, double advantage, double) {
  Expected e;
  e.low = advantage < 0 && log_ratio < rule.lower;
  e.high = advantage > 0 && log_ratio > rule.upper;
  e.dual = advantage < 0 && log_ratio > rule.limit;
  e.loss = std::fmin(ratio * advantage, std::fmin(std::fmax(ratio, rule.low), rule.high) * advantage);
  if (advantage < 0) e.loss = std::fmax(e.loss, rule.dual * advantage);
  const bool held = log_ratio > 20 || log_ratio < -20;
  if (!e.low && !e.high && !e.dual && !held) e.weight = ratio * advantage;
  return e;
}

template <class T, class Rule>
void test_policy(const Rule& rule, int64_t tokens, double spread, bool garbage, unsigned seed) {
  ++cases;
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  Buffer<T> logprobs(tokens), rollout(tokens), advantages(tokens), coefficient(tokens), again(tokens);
  Buffer<uint8_t> mask(tokens);
  double denominator = 17;
  for (int64_t t = 0; t < tokens; ++t) {
    mask[t] = uniform(random) < 0.6;
    rollout[t] = T(-3 * uniform(random));
    logprobs[t] = T(double(rollout[t]) + spread * normal(random));
    advantages[t] = T(normal(random));
    if (t % 97 == 5) logprobs[t] = rule.upper, rollout[t] = 0;
    if (t % 97 == 6) logprobs[t] = rule.lower, rollout[t] = 0;
    if (t % 97 == 7) logprobs[t] = T(-INFINITY);
    if (t % 97 == 8) logprobs[t] = rollout[t] = T(-INFINITY);
    if (t % 97 == 9) logprobs[t] = 25, rollout[t] = 0;
    if (t % 97 == 10) advantages[t] = 0;
    if (garbage && !mask[t]) logprobs[t] = advantages[t] = T(kNan);
  }
  Buffer<T> loss(1);
  Buffer<double> stats(megasao::kStats);
  const int64_t tiles = (tokens + megasao::kTile - 1) / megasao::kTile;
  const unsigned blocks = unsigned(tiles < 1 ? 1 : tiles < 3 ? tiles : 3);  // fewer blocks than tiles: they stride
  const auto run = [&](T* to, unsigned order) {
    Buffer<unsigned> ticket(1);
    Buffer<double> partials(size_t(blocks) * megasao::kStats);
    ticket[0] = 0;
    for (size_t i = 0; i < partials.size; ++i) partials[i] = kNan;
    const megasao::PolicyProblem<T> problem = {logprobs.data, rollout.data, advantages.data, mask.data, &denominator,
                                               tokens,        loss.data,    to,              stats.data};
    const megasao::Scratch scratch = {ticket.data, partials.data};
    emulator::launch(blocks, megasao::kThreads, 2, order, [&] { megasao::policy_kernel(problem, rule, scratch); });
  };
  run(coefficient.data, seed);
  double expected[megasao::kStats] = {};
  const double tolerance = sizeof(T) == 4 ? 1e-5 : 1e-12;
  for (int64_t t = 0; t < tokens; ++t) {
    double weight = 0;
    if (mask[t]) {
      const T log_ratio = logprobs[t] - rollout[t];
      ++expected[megasao::kTokens];
      if (std::isnan(log_ratio)) {
        ++expected[megasao::kInvalid];
      } else {
        const double x = std::fmin(std::fmax(double(log_ratio), -20), 20), ratio = std::exp(x);
        const Expected token = by_definition(rule, log_ratio, ratio, double(advantages[t]), double(logprobs[t]));
        weight = token.weight;
        expected[megasao::kLow] += token.low, expected[megasao::kHigh] += token.high;
        expected[megasao::kDual] += token.dual;
        expected[advantages[t] < 0 ? megasao::kNegative : megasao::kPositive] -= token.loss / denominator;
        expected[megasao::kRatio] += ratio;
        expected[megasao::kSquare] += ratio * ratio;
        expected[megasao::kMagnitude] += std::fabs(x);
        expected[megasao::kK3] += std::expm1(x) - x;
        expected[megasao::kRatioMax] = std::fmax(expected[megasao::kRatioMax], ratio);
      }
    }
    CHECK(close(coefficient[t], -weight / denominator, tolerance), "policy coefficient at %ld: %g, not %g", long(t),
          double(coefficient[t]), -weight / denominator);
  }
  const double total = expected[megasao::kPositive] + expected[megasao::kNegative];
  CHECK(close(loss[0], total, tolerance * 10), "policy loss %g, not %g", double(loss[0]), total);
  for (int i = 0; i < megasao::kStats; ++i)
    CHECK(close(stats[i], expected[i], tolerance * (i < megasao::kPositive ? 1 : 10)),
          "policy statistic %d: %.17g, not %.17g", i, stats[i], expected[i]);

  std::vector<double> first(stats.data, stats.data + megasao::kStats);
  const T first_loss = loss[0];
  run(again.data, seed + 1);
  CHECK(!std::memcmp(first.data(), stats.data, sizeof(double) * megasao::kStats) && first_loss == loss[0],
        "policy is not bitwise reproducible");
  CHECK(!tokens || !std::memcmp(again.data, coefficient.data, sizeof(T) * tokens), "policy coefficients differ");
}

template <class T>
void test_response(const std::vector<int>& lengths, unsigned parts, unsigned seed) {
  ++cases;
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), 0), sequences = int64_t(lengths.size());
  Buffer<T> logprobs(tokens), advantages(tokens), coefficient(tokens), loss(1);
  Buffer<uint8_t> mask(tokens);
  Buffer<int32_t> bounds(sequences + 1);
  Buffer<double> weights(sequences), sums(size_t(sequences) * megasao::kResponseSums), sides(2);
  const double alpha = 0.25, denominator = 11;
  bounds[0] = 0;
  for (int64_t b = 0; b < sequences; ++b) bounds[b + 1] = bounds[b] + lengths[b], weights[b] = uniform(random);
  for (int64_t t = 0; t < tokens; ++t) {
    mask[t] = uniform(random) < 0.6;
    logprobs[t] = mask[t] ? T(-3 * uniform(random)) : T(kNan);
    advantages[t] = mask[t] ? T(t % 11 ? normal(random) : 0) : T(kNan);
    coefficient[t] = T(kNan);
  }
  const megasao::ResponseProblem<T> problem = {logprobs.data, advantages.data, mask.data, bounds.data,
                                               tokens,        sequences,       parts};
  const unsigned blocks = unsigned(sequences) * parts;
  const auto run = [&](unsigned order) {
    Buffer<unsigned> tickets(sequences), ticket(1);
    Buffer<double> partials(size_t(blocks) * megasao::kResponseSums), halves(size_t(blocks) * 2);
    for (int64_t b = 0; b < sequences; ++b) tickets[b] = 0;
    ticket[0] = 0;
    for (size_t i = 0; i < partials.size; ++i) partials[i] = kNan;
    const megasao::Scratch each = {tickets.data, partials.data}, all = {ticket.data, halves.data};
    const megasao::ResponseLosses<T> losses = {weights.data, &denominator, alpha, loss.data, coefficient.data, sides.data};
    emulator::launch(blocks, megasao::kThreads, 2, order,
                     [&] { megasao::response_sums_kernel(problem, sums.data, each); });
    emulator::launch(blocks, megasao::kThreads, 2, order,
                     [&] { megasao::response_loss_kernel(problem, losses, all); });
  };
  run(seed);
  const double tolerance = sizeof(T) == 4 ? 1e-6 : 1e-12;
  double expected_sides[2] = {};
  for (int64_t b = 0; b < sequences; ++b) {
    double expected[megasao::kResponseSums] = {};
    for (int64_t t = bounds[b]; t < bounds[b + 1]; ++t) {
      double weight = 0;
      if (mask[t]) {
        const double advantage = advantages[t];
        expected[megasao::kNll] -= logprobs[t], ++expected[megasao::kCount];
        expected[megasao::kAbove] += advantage > 0, expected[megasao::kBelow] += advantage < 0;
        weight = -(advantage < 0 ? alpha : 1) * advantage * weights[b] / denominator;
        expected_sides[advantage < 0] += weight * logprobs[t];
      }
      CHECK(close(coefficient[t], weight, tolerance), "response coefficient at %ld: %g, not %g", long(t),
            double(coefficient[t]), weight);
    }
    for (int i = 0; i < megasao::kResponseSums; ++i)
      CHECK(close(sums[i * sequences + b], expected[i], 1e-12), "response sum %d of %ld: %g, not %g", i, long(b),
            sums[i * sequences + b], expected[i]);
  }
  for (int i = 0; i < 2; ++i)
    CHECK(close(sides[i], expected_sides[i], 1e-12), "response side %d: %g, not %g", i, sides[i], expected_sides[i]);
  CHECK(close(loss[0], expected_sides[0] + expected_sides[1], tolerance), "response loss %g", double(loss[0]));
  std::vector<double> first(sums.data, sums.data + sums.size), first_sides(sides.data, sides.data + 2);
  run(seed + 1);
  CHECK(!std::memcmp(first.data(), sums.data, sizeof(double) * sums.size) &&
            !std::memcmp(first_sides.data(), sides.data, 2 * sizeof(double)),
        "responses are not bitwise reproducible");
}

template <class T>
void test_all(unsigned seed) {
  const std::vector<std::vector<int>> shapes = {
      {1}, {7}, {8}, {9}, {2047}, {2048}, {2049}, {0, 3, 0, 0, 5, 0}, {6000}, {2048, 2048, 2048}, {2047, 2, 2047},
      {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {100, 3000, 0, 1, 2500, 700}, {100, 100, 100, 100}};
  for (const auto& lengths : shapes) {
    test_gae<T>({lengths, 0, false, 1.0, 1.0}, seed++);
    test_gae<T>({lengths, 6, true, 0.99, -1}, seed++);
  }
  std::vector<int> tiny(1500);
  for (size_t i = 0; i < tiny.size(); ++i) tiny[i] = int(i % 7);
  test_gae<T>({tiny, 3, true, 0.9, -1}, seed++);
  test_gae<T>({std::vector<int>{2048 * 40 + 3}, 1000, false, 1.0, 1.0}, seed++);  // looks back over more than a warp
  test_gae<T>({std::vector<int>{9000}, 3000, false, 1.0, 0.95}, seed++);
  test_gae<T>({std::vector<int>{5000}, 0, false, 0.5, 0.1}, seed++);  // underflows: the map of a tile is a constant
  test_gae<T>({std::vector<int>{300, 4000}, 4, false, 0.5, 0.0}, seed++);
  const megasao::DisRule<T> dis = {T(std::log(0.7)), T(std::log(6.0))};
  const megasao::PpoRule<T> ppo = {T(std::log(0.8)), T(std::log(1.3)), T(std::log(2.0)), T(0.8), T(1.3), T(2.0)};
  const megasao::PpoRule<T> single = {ppo.lower, ppo.upper, T(INFINITY), T(0.8), T(1.3), T(INFINITY)};
  for (int64_t tokens : {0, 1, 7, 8, 2047, 2048, 2049, 9001}) {
    test_policy<T>(dis, tokens, 1.0, tokens % 2 == 1, seed++);
    test_policy<T>(ppo, tokens, 1.0, tokens % 2 == 1, seed++);
  }
  test_policy<T>(dis, 3000, 1e-3, true, seed++);
  test_policy<T>(dis, 3000, 12, false, seed++);
  test_policy<T>(single, 3000, 0.3, true, seed++);
  test_policy<T>(ppo, 3000, 12, false, seed++);
  for (unsigned parts : {1u, 2u, 5u}) {
    test_response<T>({1}, parts, seed++);
    test_response<T>({3, 0, 5, 8, 1, 2048, 17}, parts, seed++);
    test_response<T>({4100, 2047, 5000}, parts, seed++);
  }
}

}  // namespace

int main() {
  for (int tiles : {1, 2, 31, 32, 33, 64, 65, 100})
    for (int final_tile : {0, tiles / 3, tiles - 1})
      for (int constant_tile : {-1, tiles / 2}) test_look_back(tiles, final_tile, constant_tile, unsigned(tiles));
  test_all<float>(1);
  test_all<double>(1000);
  std::printf("%d cases, %d failures\n", cases, failures);
  return failures ? 1 : 0;
}
