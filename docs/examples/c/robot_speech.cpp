// Chats in a terminal: each input line is a turn.
//
//   printf 'Hello\nWhat can you do?\n' | robot_speech BUNDLE [SECONDS [TEMPERATURE [BEGIN END]]]
//
// BEGIN and END are the text that the chat template writes around a user's message.
//
// g++ -std=c++17 robot_speech.cpp $(pkg-config --cflags --libs edge) -pthread -o robot_speech
#include "robot_speech.h"

#include <cstdlib>
#include <iostream>

int main(int count, char** words) try {
  if (count < 2)
    return std::cerr << "usage: robot_speech BUNDLE [SECONDS [TEMPERATURE [BEGIN END]]]\n", 2;
  robot::Manner manner;
  if (count > 2) manner.deadline_s = std::atof(words[2]);
  if (count > 3) manner.temperature = std::atof(words[3]);
  if (count > 5) manner.begin = words[4], manner.end = words[5];
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<std::string> ended;  // holds the error message, empty on success
  robot::Speech speech(
      words[1], manner, [](const std::string& text) { std::cout << text << std::flush; },
      [&](edge_finish, const std::string& error) {
        std::lock_guard<std::mutex> lock(mutex);
        ended = error;
        changed.notify_one();
      });
  for (std::string line; std::getline(std::cin, line);) {
    speech.ask(line);
    std::unique_lock<std::mutex> lock(mutex);  // a robot's loop would continue here
    changed.wait(lock, [&] { return ended.has_value(); });
    if (!ended->empty()) return std::cerr << *ended << "\n", 1;
    ended.reset();
    std::cout << std::endl;
  }
} catch (const std::exception& problem) {
  return std::cerr << problem.what() << "\n", 1;
}
