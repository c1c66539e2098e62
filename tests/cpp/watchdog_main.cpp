// Runs the tests; one that hangs is named and ends the program with status 124. The limit per test is
// generous, because a machine may be slow and sanitizers are: it is for deadlocks only. Seconds in
// NUMA_MOE_TEST_LIMIT.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

namespace {

char hang_message[512];  // made ready before the test, for a signal handler may only write it

void on_alarm(int) {
  const ssize_t written = write(STDERR_FILENO, hang_message, strlen(hang_message));
  _exit(written < 0 ? 125 : 124);
}

unsigned limit_seconds() {
  const char* limit = std::getenv("NUMA_MOE_TEST_LIMIT");
  return limit != nullptr ? static_cast<unsigned>(std::atoi(limit)) : 300;
}

class Watchdog : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo& test) override {
    const std::string message =
        std::string("[  HANGS   ] ") + test.test_suite_name() + "." + test.name() + "\n";
    std::strncpy(hang_message, message.c_str(), sizeof(hang_message) - 1);
    alarm(limit_seconds());
  }
  void OnTestEnd(const testing::TestInfo&) override { alarm(0); }
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  struct sigaction action = {};
  action.sa_handler = on_alarm;
  sigaction(SIGALRM, &action, nullptr);
  testing::UnitTest::GetInstance()->listeners().Append(new Watchdog);
  alarm(limit_seconds());  // the child process of a death test calls no listener
  return RUN_ALL_TESTS();
}
