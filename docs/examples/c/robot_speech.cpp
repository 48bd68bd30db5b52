// Chats in a terminal: each input line is a turn.
//
//   printf 'Hello\nWhat can you do?\n' | robot_speech BUNDLE [SECONDS [TEMPERATURE [CHOICE...]]]
//
// With choices, each answer is one of them. --json-schema SCHEMA or --regex REGEX in their place says
// what an answer looks like, if this is compiled with llguidance: see forms.h. For models whose chat
// template is not that of the demonstrations, put --template OPENING BEGIN END CLOSING first: see
// `Template`.
//
// g++ -std=c++17 robot_speech.cpp $(pkg-config --cflags --libs edge) -pthread -o robot_speech
#include "robot_speech.h"

#include <cstdlib>
#include <iostream>

int main(int count, char** words) try {
  robot::Template chat;
  if (count > 5 && words[1] == std::string("--template")) {
    chat = {words[2], words[3], words[4], words[5]};
    count -= 5, words += 5;
  }
  if (count < 2)
    return std::cerr << "usage: robot_speech BUNDLE [SECONDS [TEMPERATURE "
                        "[CHOICE... | --json-schema SCHEMA | --regex REGEX]]]\n", 2;
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<robot::Answer> ended;
  robot::Speech speech(words[1], chat);
  robot::Question question;
  question.sampling = speech.sampling();
  if (count > 2) question.deadline_s = std::atof(words[2]);
  if (count > 3) question.sampling.temperature = std::atof(words[3]);
  std::string kind = count == 6 ? words[4] : "";
  if (kind == "--json-schema") question.json_schema = words[5];
  else if (kind == "--regex") question.regex = words[5];
  else for (int i = 4; i < count; i++) question.choices.push_back(words[i]);
  while (std::getline(std::cin, question.text)) {
    speech.ask(
        question, [](const std::string& piece) { std::cout << piece << std::flush; },
        [&](const robot::Answer& answer) {
          std::lock_guard<std::mutex> lock(mutex);
          ended = answer;
          changed.notify_one();
        });
    std::unique_lock<std::mutex> lock(mutex);  // a robot's loop would continue here
    changed.wait(lock, [&] { return ended.has_value(); });
    if (!ended->error.empty()) return std::cerr << ended->error << "\n", 1;
    ended.reset();
    std::cout << std::endl;
  }
} catch (const std::exception& problem) {
  return std::cerr << problem.what() << "\n", 1;
}
