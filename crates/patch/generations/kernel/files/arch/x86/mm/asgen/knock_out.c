// SPDX-License-Identifier: GPL-2.0
/*
 * Address-space generations: breaking one rule at a time, by a word on the
 * kernel's command line (asgen.knock_out=leaves), to see that the tests notice.
 */
#include <linux/init.h>
#include <linux/kernel.h>
#include <linux/string.h>

#include "asgen.h"

static const char *const names[] = {
	[ASGEN_RULE_LEAVES] = "leaves",
	[ASGEN_RULE_TABLES] = "tables",
	[ASGEN_RULE_BATCH] = "batch",
	[ASGEN_RULE_DIRTY] = "dirty",
	[ASGEN_RULE_REAP] = "reap",
	[ASGEN_RULE_PROBES] = "probes",
	[ASGEN_RULE_ASID] = "asid",
	[ASGEN_RULE_BEHIND] = "behind",
	[ASGEN_RULE_GLOBAL] = "global",
	[ASGEN_RULE_LEAVE] = "leave",
};

static int knocked_out __ro_after_init = -1;

bool asgen_holds(enum asgen_rule rule)
{
	return rule != knocked_out;
}

static int __init knock_out(char *name)
{
	knocked_out = match_string(names, ARRAY_SIZE(names), name);
	if (knocked_out < 0)
		panic("asgen: there is no rule %s", name);
	pr_warn("asgen: the rule %s does not hold\n", name);
	return 0;
}
early_param("asgen.knock_out", knock_out);
