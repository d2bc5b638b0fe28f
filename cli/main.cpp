#include "cli/command.h"

int main(int argc, char** argv) { return rafter::cli::run_tool(argc, argv); }
