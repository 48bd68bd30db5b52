// The C interface of text: prompts, tokens, decoders and choices.
#include <algorithm>

#include "api.h"
#include "choices.h"
#include "decoder.h"

using namespace edge_lib;

struct edge_decoder {
  Decoder own;
};
struct edge_choices {
  Choices own;
};

extern "C" {

edge_status edge_bundle_use_tokenizer(edge_bundle* bundle, const edge_tokenizer* tokenizer,
                                      edge_error* error) {
  return guarded(error, [&] {
    const OpenBundle& opened = *given(bundle, "bundle").opened;
    opened.use(taken(&given(tokenizer, "tokenizer"), EDGE_TOKENIZER, "tokenizer"));
  });
}

edge_status edge_bundle_prompt(const edge_bundle* bundle, const edge_part* parts, size_t part_count,
                               int32_t* tokens, size_t capacity, size_t* count, edge_error* error) {
  return guarded(error, [&] {
    const Tokenizer& tokenizer = given(bundle, "bundle").opened->tokenizer();
    given(count, "count");
    for (size_t i = 0; i < part_count; i++)
      if (!given(parts, "parts").text && parts[i].bytes) given(parts[i].text, "text");
    std::vector<int32_t> ids = tokenizer.encode(parts, part_count);
    *count = ids.size();
    if (ids.empty() || ids.size() > capacity) return;
    std::copy(ids.begin(), ids.end(), &given(tokens, "tokens"));
  });
}

edge_status edge_bundle_encode(const edge_bundle* bundle, const char* text, size_t bytes,
                               int32_t* tokens, size_t capacity, size_t* count, edge_error* error) {
  edge_part whole = {text, bytes, 0};
  return edge_bundle_prompt(bundle, &whole, 1, tokens, capacity, count, error);
}

edge_status edge_bundle_token(const edge_bundle* bundle, const char* text, int32_t* token,
                              edge_error* error) {
  return guarded(error, [&] {
    int32_t found = given(bundle, "bundle").opened->tokenizer().special(&given(text, "text"));
    given(token, "token") = found;
    if (found < 0)
      throw Fault{EDGE_ERROR_INPUT, "is not a special token: " + brief(text), "", "text"};
  });
}

edge_status edge_bundle_decode(const edge_bundle* bundle, const int32_t* tokens, size_t count,
                               char* text, size_t capacity, size_t* bytes, edge_error* error) {
  return guarded(error, [&] {
    const Tokenizer& tokenizer = given(bundle, "bundle").opened->tokenizer();
    if (count) given(tokens, "tokens");
    size_t total = 0;
    for (size_t i = 0; i < count; i++) total += tokenizer.bytes(tokens[i]).size();
    given(bytes, "bytes") = total;
    if (!total || total > capacity) return;
    given(text, "text");
    for (size_t i = 0; i < count; i++) {
      const std::string& each = tokenizer.bytes(tokens[i]);
      text = std::copy(each.begin(), each.end(), text);
    }
  });
}

edge_status edge_decoder_new(const edge_bundle* bundle, const edge_decoder_options* options,
                             edge_decoder** decoder, edge_error* error) {
  return guarded(error, [&] {
    given(decoder, "decoder") = nullptr;
    edge_decoder_options asked = taken(options, EDGE_DECODER_OPTIONS, "options");
    *decoder = new edge_decoder{Decoder(given(bundle, "bundle").opened, asked)};
  });
}

void edge_decoder_free(edge_decoder* decoder) { delete decoder; }

edge_status edge_decoder_feed(edge_decoder* decoder, int32_t token, const char** text,
                              size_t* bytes, int32_t* stopped, edge_error* error) {
  return guarded(error, [&] {
    std::string_view found = given(decoder, "decoder").own.feed(token);
    if (text) *text = found.data();
    if (bytes) *bytes = found.size();
    if (stopped) *stopped = decoder->own.stopped();
  });
}

edge_status edge_decoder_finish(edge_decoder* decoder, const char** text, size_t* bytes,
                                edge_error* error) {
  return guarded(error, [&] {
    std::string_view found = given(decoder, "decoder").own.finish();
    if (text) *text = found.data();
    if (bytes) *bytes = found.size();
  });
}

edge_status edge_choices_new(const edge_bundle* bundle, const char* const* texts, size_t count,
                             edge_choices** choices, edge_error* error) {
  return guarded(error, [&] {
    given(choices, "choices") = nullptr;
    *choices = new edge_choices{Choices(given(bundle, "bundle").opened, texts, count)};
  });
}

void edge_choices_free(edge_choices* choices) { delete choices; }

edge_status edge_choices_begin(edge_choices* choices, edge_constraint* constraint,
                               edge_error* error) {
  return guarded(error, [&] {
    Choices& own = given(choices, "choices").own;
    edge_constraint made = EDGE_CONSTRAINT;
    made.allow = [](void* user, uint32_t* mask, size_t words) {
      static_cast<Choices*>(user)->allow(mask, words);
      return 0;
    };
    // a program in C may call it too, and no exception may pass through its frames
    made.accept = [](void* user, int32_t token) {
      try {
        return static_cast<Choices*>(user)->accept(token) ? EDGE_CONSTRAINT_DONE : 0;
      } catch (const Fault&) {
        return -1;
      }
    };
    made.user = &own;
    give(constraint, made, "constraint");
    own.begin();
  });
}

int32_t edge_choices_found(const edge_choices* choices) {
  return choices ? choices->own.found() : -1;
}
}
