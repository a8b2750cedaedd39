// Attention of prompts alone, for a model whose other operations are torch's.
#pragma once

#include "amx.h"
#include "prompt.h"
#include "team.h"

namespace disagg {

class PromptCall {
 public:
  PromptCall() : team_(1, &PromptCall::program, this) {}
  ~PromptCall() {
    if (is_usable()) team_.clear();
  }

  bool is_usable() const { return team_.is_usable(); }

  Status run(const Prompts& prompts, const KVPages& cache, int num_threads) {
    team_.clear();
    num_threads = team_.reserve(num_threads);
    if (!attention_.prepare(prompts, cache, num_threads)) return NO_MEMORY;
    team_.run(num_threads);
    return DONE;
  }

 private:
  static void program(void* call, Member& member) {
    PromptAttention& attention = static_cast<PromptCall*>(call)->attention_;
    const Tiles tiles;
    member.phase(attention.num_items(), [&](int item) { attention.attend(member.id, item); });
  }

  PromptAttention attention_;
  Team team_;
};

}  // namespace disagg
