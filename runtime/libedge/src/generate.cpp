// Generation of an answer: prefill, then sample and step until something ends it.
#include <algorithm>
#include <chrono>

#include "session.h"

namespace edge_lib {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool listed(const int32_t* ids, size_t count, int32_t token) {
  return std::find(ids, ids + count, token) != ids + count;
}

// Returns whether a constraint's callback, which returned `found`, says that the answer is complete.
bool complete(const char* doing, int found) {
  if (found && found != EDGE_CONSTRAINT_DONE)
    throw Fault{EDGE_ERROR_INPUT,
                std::string("failed to ") + doing + ", with " + std::to_string(found), "",
                "constraint"};
  return found != 0;
}

}  // namespace

size_t Session::recent_from(const edge_sampling& how) const {
  size_t window = size_t(how.repetition_window);
  return tokens_.size() > window ? tokens_.size() - window : 0;
}

int32_t Session::sample(const edge_sampling& how, size_t recent_from) {
  if (!rows_)
    throw Fault{EDGE_ERROR_INPUT, "there are no logits to sample from: run tokens first", "",
                "session"};
  const Bundle& known = bundle();
  const float* last =
      reinterpret_cast<const float*>(logits_.data()) + (rows_ - 1) * known.config.vocab;
  sampler_.begin(last, size_t(std::min(known.token_count, known.config.vocab)), how);
  if (how.repetition_penalty != 1) {
    int32_t left = how.repetition_window;
    auto penalize = [&](int32_t token) {
      // special tokens are structure, not repetition
      bool counts = token >= 0 && token != known.bos && token != known.pad &&
                    !listed(known.eos.data(), known.eos.size(), token);
      if (counts && left-- > 0) sampler_.penalize(token, float(how.repetition_penalty));
    };
    penalize(pending_);
    for (size_t i = tokens_.size(); i > recent_from && left > 0; i--) penalize(tokens_[i - 1]);
  }
  return sampler_.sample(how, rng_);
}

edge_finish Session::generate(const int32_t* prompt, size_t count, const edge_generation& how,
                              const edge_sampling& sampling, edge_result& result) {
  auto began = Clock::now();
  check_sampling(sampling, bundle().config.vocab);
  Faults faults;
  if (how.max_tokens < 1) faults.add("max_tokens", "must be at least 1");
  if (!(how.deadline_s >= 0)) faults.add("deadline_s", "must not be negative");
  if (how.constraint && !(how.constraint->allow && how.constraint->accept))
    faults.add("constraint", "has a callback that is NULL");
  if ((how.stop_count && !how.stop) || (count && !prompt))
    faults.add(count && !prompt ? "prompt" : "stop", "is NULL");
  faults.refuse(EDGE_ERROR_INPUT);
  needs_choice("generate");
  size_t waiting = pending_ >= 0;
  if (!count && !waiting && !rows_)
    throw Fault{EDGE_ERROR_INPUT, "is empty, and there is nothing to continue from", "", "prompt"};
  for (size_t i = 0; i < count; i++)
    if (prompt[i] < 0 || prompt[i] >= bundle().config.vocab)
      throw Fault{EDGE_ERROR_INPUT, "has a token id that is out of range", "", "prompt"};
  check_room(ledger_.position + int64_t(waiting + count));
  bool full = false;
  auto halted = [&](edge_finish* why) {
    *why = EDGE_FINISH_CANCELLED;
    if (cancelled_.exchange(false, std::memory_order_acq_rel)) return true;
    *why = EDGE_FINISH_DEADLINE;
    if (how.deadline_s > 0 && seconds_since(began) >= how.deadline_s) return true;
    *why = EDGE_FINISH_CONTEXT;
    return full;
  };
  edge_finish why = EDGE_FINISH_STOP;
  for (size_t fed = 0; fed < waiting + count;) {
    if (halted(&why)) return result.prompt_s = seconds_since(began), why;
    // the pending token goes first, with the beginning of the prompt
    size_t here = std::min(size_t(bundle().chunk), waiting + count - fed);
    feed_.clear();
    for (size_t i = fed; i < fed + here; i++)
      feed_.push_back(i < waiting ? pending_ : prompt[i - waiting]);
    run(feed_.data(), here, nullptr, here > 1 ? uint32_t(EDGE_RUN_COMMIT) : 0);
    fed += here;
    result.prompt_tokens = int64_t(fed);
  }
  result.prompt_s = seconds_since(began);
  if (sampling.has_seed) rng_ = Rng(sampling.seed);
  size_t from = recent_from(sampling);
  const edge_constraint* form = how.constraint;
  edge_sampling within = sampling;
  for (;;) {
    if (form) {
      std::fill(mask_.begin(), mask_.end(), 0u);
      if (complete("allow ids", form->allow(form->user, mask_.data(), mask_.size())))
        return EDGE_FINISH_STOP;
      for (size_t i = 0; sampling.allowed && i < mask_.size(); i++)
        mask_[i] &= i < sampling.allowed_words ? sampling.allowed[i] : 0;
      within.allowed = mask_.data(), within.allowed_words = mask_.size();
    }
    int32_t token = sample(within, from);
    pending_ = token;
    result.tokens++;
    bool last = form && complete("accept a token", form->accept(form->user, token));
    bool over = how.on_token && how.on_token(how.user, token);
    if (last) return EDGE_FINISH_STOP;
    const auto& eos = bundle().eos;
    if ((!how.ignore_eos && listed(eos.data(), eos.size(), token)) ||
        (how.stop_count && listed(how.stop, how.stop_count, token)))
      return EDGE_FINISH_STOP;
    if (result.tokens >= how.max_tokens) return EDGE_FINISH_LENGTH;
    if (over) return EDGE_FINISH_CANCELLED;
    full = !layout_.caches.empty() && ledger_.position >= sizes_.capacity;
    if (halted(&why)) return why;
    run(&token, 1, nullptr, 0);
  }
}

}  // namespace edge_lib
