// docs/derivations.md cannot rot: every command in it is run and every figure beside it compared.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "cli/run_tool.h"

namespace rafter::test {
namespace {

struct Figure {
  std::string path, stated;
  int line = 0;
};
struct Block {
  std::string command;
  int line = 0;
  std::vector<Figure> figures;
};

/// The commands of the page's console blocks, each with the "key: value" lines below it.
std::vector<Block> read_page() {
  std::ifstream page(std::string(RAFTER_SOURCE_DIR) + "/docs/derivations.md");
  std::vector<Block> blocks;
  bool inside = false;
  int number = 0;
  for (std::string line; std::getline(page, line);) {
    ++number;
    if (line.starts_with("```")) {
      inside = line == "```console";
    } else if (inside && line.starts_with("$ rafter ")) {
      blocks.push_back({line.substr(9), number, {}});
    } else if (inside && !line.empty()) {
      const std::size_t colon = line.find(": ");
      if (colon == std::string::npos || blocks.empty()) {
        ADD_FAILURE() << "line " << number << " is neither a command nor key: value";
      } else {
        blocks.back().figures.push_back({line.substr(0, colon), line.substr(colon + 2), number});
      }
    }
  }
  return blocks;
}

std::vector<std::string> words_of(const std::string& command) {
  std::istringstream stream(command);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) {
    words.push_back(word);
  }
  return words;
}

/// steps.0.l in a document; null when there is no such thing.
const nlohmann::ordered_json* find(const nlohmann::ordered_json& document,
                                   const std::string& path) {
  const nlohmann::ordered_json* at = &document;
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find('.', begin), path.size());
    const std::string key = path.substr(begin, end - begin);
    if (at->is_array() && std::stoul(key) < at->size()) {
      at = &(*at)[std::stoul(key)];
    } else if (at->is_object() && at->contains(key)) {
      at = &at->at(key);
    } else {
      return nullptr;
    }
    begin = end + 1;
  }
  return at;
}

/// Half a unit of the last digit stated: 295.22 is within 0.005; whole numbers are exact.
double rounding_of(const std::string& stated) {
  const std::size_t point = stated.find('.');
  return point == std::string::npos
             ? 0
             : 0.5 * std::pow(10.0, -static_cast<double>(stated.size() - point - 1));
}

void compare(const nlohmann::ordered_json& document, const Figure& figure) {
  const std::string where = "docs/derivations.md:" + std::to_string(figure.line) + ": " +
                            figure.path + ": " + figure.stated;
  const nlohmann::ordered_json* found = find(document, figure.path);
  ASSERT_NE(found, nullptr) << where;
  if (found->is_number()) {
    const double stated = std::stod(figure.stated);
    const double slack = rounding_of(figure.stated) * (1 + 1e-9) + 1e-12 * std::abs(stated);
    // Rates are stated to the FLOP/s although they are real numbers.
    const double whole = figure.path.ends_with("per_s") ? 0.5 : 0;
    EXPECT_NEAR(found->get<double>(), stated, slack + whole) << where;
  } else {
    EXPECT_EQ(found->is_string() ? found->get<std::string>() : found->dump(), figure.stated)
        << where;
  }
}

TEST(Derivations, EveryCommandOfThePageGivesItsFigures) {
  const std::vector<Block> blocks = read_page();
  ASSERT_GT(blocks.size(), 50U);
  for (const Block& block : blocks) {
    SCOPED_TRACE("docs/derivations.md:" + std::to_string(block.line) + ": rafter " + block.command);
    EXPECT_FALSE(block.figures.empty()) << "a command without a figure";
    const nlohmann::ordered_json document = run_json(words_of(block.command));
    for (const Figure& figure : block.figures) {
      compare(document, figure);
    }
  }
}

TEST(Derivations, EveryCommandInTheTextIsAccepted) {
  std::ifstream page(std::string(RAFTER_SOURCE_DIR) + "/docs/derivations.md");
  int commands = 0;
  for (std::string line; std::getline(page, line);) {
    for (std::size_t at = line.find("`rafter "); at != std::string::npos;
         at = line.find("`rafter ", at + 1)) {
      const std::string command = line.substr(at + 8, line.find('`', at + 1) - at - 8);
      const ToolRun run = run_tool(words_of(command));
      EXPECT_EQ(run.exit_code, 0) << command << "\n" << run.err;
      ++commands;
    }
  }
  EXPECT_GT(commands, 5);
}

}  // namespace
}  // namespace rafter::test
