/* A job, from its queries to its rows of the result. */

#pragma once

#include "attention_types.h"

INTERNAL void run_job(const struct attention *a, const struct job *job);
