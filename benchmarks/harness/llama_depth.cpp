// llama.cpp decoding with a filled cache, as a worker of the benchmarks (see worker.py for the lines it exchanges).
//
//   llama-depth MODEL THREADS DEPTH STEPS
//
// What a decode step costs depends on how much the cache holds, not on what. So only a short prompt is computed; copies of
// it, moved to the positions behind it, fill the rest up to DEPTH, where llama-bench would compute an hour. Everything goes
// through the public API. Each request then times STEPS steps as llama-bench does: batches of one random token, logits
// asked for and not sampled, with its thread pool, a q8_0 cache and flash attention.
//
// A request may be any line, and so may the answer to {"prepared": true}. By hand: yes | head -6 | llama-depth … (3 samples)

#include "build-info.h"
#include "ggml-cpu.h"
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int kPrompt = 512;  // tokens that are computed: one batch
constexpr llama_seq_id kStream = 0;
constexpr llama_seq_id kCopy = 1;  // holds a copy until its positions are right

template <auto Free>
struct Deleter {
    template <typename T>
    void operator()(T * object) const { Free(object); }
};
using Model = std::unique_ptr<llama_model, Deleter<llama_model_free>>;
using Context = std::unique_ptr<llama_context, Deleter<llama_free>>;
using ThreadPool = std::unique_ptr<ggml_threadpool, Deleter<ggml_threadpool_free>>;

void only_errors(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) { std::fputs(text, stderr); }
}

// One sequence in a cache of DEPTH tokens and a little more.
class FilledCache {
public:
    // Throws std::runtime_error where llama.cpp refuses.
    FilledCache(const std::string & path, int threads, int depth, int steps) : depth_(depth), steps_(steps) {
        model_.reset(llama_model_load_from_file(path.c_str(), llama_model_default_params()));
        if (!model_) { throw std::runtime_error("cannot load " + path); }
        vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model_.get()));
        llama_context_params params = llama_context_default_params();
        params.n_ctx = depth + kPrompt + steps + 1;  // the last copy is whole before it is cut to what is missing
        params.n_batch = params.n_ubatch = kPrompt;
        params.n_seq_max = 2;
        params.kv_unified = true;  // both sequences in the same cells: handing a copy over moves nothing
        params.n_threads = params.n_threads_batch = threads;
        params.type_k = params.type_v = GGML_TYPE_Q8_0;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        context_.reset(llama_init_from_model(model_.get(), params));
        if (!context_) { throw std::runtime_error("cannot make a context"); }
        ggml_threadpool_params pool = ggml_threadpool_params_default(threads);
        pool_.reset(ggml_threadpool_new(&pool));
        if (!pool_) { throw std::runtime_error("cannot make a thread pool"); }
        llama_attach_threadpool(context_.get(), pool_.get(), nullptr);
        fill();
        decode(1);  // moves the copied keys to their positions, once
    }

    // Tokens per second of steps at DEPTH. An untimed one wakes the threads.
    double measure() {
        llama_memory_seq_rm(llama_get_memory(context_.get()), kStream, depth_, -1);
        decode(1);
        const auto start = std::chrono::steady_clock::now();
        for (int step = 0; step < steps_; ++step) { decode(1); }
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        return steps_ / seconds.count();
    }

private:
    // `count` random tokens at the end of the stream, as one batch.
    void decode(int count) {
        std::vector<llama_token> tokens(count);
        for (llama_token & token : tokens) { token = static_cast<llama_token>(random_() % vocab_); }
        const int status = llama_decode(context_.get(), llama_batch_get_one(tokens.data(), count));
        if (status != 0) { throw std::runtime_error("llama_decode returned " + std::to_string(status)); }
        llama_synchronize(context_.get());
    }

    void fill() {
        llama_memory_t memory = llama_get_memory(context_.get());
        if (!llama_memory_can_shift(memory)) { throw std::runtime_error("this model's cache cannot shift positions"); }
        const int prompt = std::min(kPrompt, depth_);
        decode(prompt);
        std::vector<uint8_t> state(llama_state_seq_get_size(context_.get(), kStream));
        if (llama_state_seq_get_data(context_.get(), state.data(), state.size(), kStream) != state.size()) {
            throw std::runtime_error("cannot read the prompt's state");
        }
        for (int filled = prompt; filled < depth_; filled += prompt) {
            if (llama_state_seq_set_data(context_.get(), state.data(), state.size(), kCopy) == 0) {
                throw std::runtime_error("cannot write a copy of the prompt's state");
            }
            llama_memory_seq_rm(memory, kCopy, depth_ - filled, -1);
            llama_memory_seq_add(memory, kCopy, 0, -1, filled);
            llama_memory_seq_cp(memory, kCopy, kStream, -1, -1);
            llama_memory_seq_rm(memory, kCopy, -1, -1);
        }
        if (llama_memory_seq_pos_min(memory, kStream) != 0 || llama_memory_seq_pos_max(memory, kStream) != depth_ - 1) {
            throw std::runtime_error("the copies do not fill the cache");
        }
    }

    Model model_;  // these end in reverse order, and each uses the ones before it
    ThreadPool pool_;
    Context context_;
    std::minstd_rand random_{1};
    int vocab_ = 0, depth_, steps_;
};

int positive(const char * text) {
    const int value = std::atoi(text);
    if (value < 1) { throw std::runtime_error(std::string("not a positive number: ") + text); }
    return value;
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 5) {
        std::fprintf(stderr, "usage: %s MODEL THREADS DEPTH STEPS\n", argv[0]);
        return 2;
    }
    llama_log_set(only_errors, nullptr);
    std::unique_ptr<FilledCache> cache;
    try {
        cache = std::make_unique<FilledCache>(argv[1], positive(argv[2]), positive(argv[3]), positive(argv[4]));
        std::cout << R"({"ready": true, "info": {"version": "build )" << llama_commit() << R"("}})" << std::endl;
        for (std::string line; std::getline(std::cin, line);) {
            std::cout << R"({"prepared": true})" << std::endl;
            if (!std::getline(std::cin, line)) { break; }
            std::cout << R"({"values": [)" << cache->measure() << "]}" << std::endl;
        }
    } catch (const std::exception & error) {  // the texts above hold nothing that JSON would want escaped, but for paths
        std::cout << (cache ? R"({"reason": ")" : R"({"ready": false, "reason": ")") << error.what() << "\"}" << std::endl;
        return 1;
    }
    return 0;
}
