"""Speed comparisons with other libraries. A benchmark prints a table and has no pass or fail criterion."""
