// Only the attention of prompts, for a model whose other operations torch computes.
#pragma once

#include "amx.h"
#include "prompt.h"
#include "team.h"

namespace disagg {

class PromptCall {
 public:
  bool is_usable() const { return team_.is_usable(); }

  Status run(const Prompts& prompts, const KVPages& cache, int num_threads) {
    team_.clear();
    num_threads = team_.reserve(num_threads);
    if (!attention_.prepare(prompts, cache, num_threads)) return NO_MEMORY;
    team_.run(num_threads, *this);
    return DONE;
  }

  // The program of each thread of the team.
  void program(Member& member) {
    const Tiles tiles;
    member.phase(attention_.num_items(), [&](int item) { attention_.attend(member.id, item); });
  }

 private:
  PromptAttention attention_;
  Team team_{1};  // the last member, so that its threads end before the data that they use is freed
};

}  // namespace disagg
