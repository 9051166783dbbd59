"""An over-optimisation study as a page people can read: what the intervals support, in words, and every number in tables."""

import math
from collections.abc import Iterator, Sequence

from rewarden.evals.chart import Line, Panel, svg
from rewarden.evals.overoptimization_read import ONE
from rewarden.evals.overoptimization_stats import Effect
from rewarden.evals.overoptimization_types import PolicyResult, RuleResult, SettingResult, Study

NAMED = 6
"""Rules that a sentence names; more are counted, and stand in the table."""


def page(study: Study) -> str:
    """Markdown: what the data support, then tables for each setting."""
    share = f"{study.confidence:.0%}"
    lines = [
        "# Over-optimisation: gold and proxy",
        "",
        *(paragraph for one in study.settings for paragraph in (_said(study, one), "")),
        _caution(study),
        "",
        f"How to read the tables. Best-of-n figures are means over all subsets of n of the N answers. [a, b] is a {share} "
        "interval over seeds (Student's t of the seeds' means), (a, b) one over the prompts of these seeds (bootstrap). `rise` "
        "is gold at the peak less gold at n = 1, `change after the peak` gold at the largest n less gold at the peak; the peak "
        "that a prompt is measured at is that of the other half of the prompts. Differences are paired: the same prompts and "
        "answers.",
        "",
    ]
    for one in study.settings:
        lines += [
            f"## {one.name}",
            "",
            *_curve_table(study, one),
            "",
            *_difference_table(study, one),
            "",
            *_diversity_table(one),
            "",
        ]
        if one.policies:
            lines += [*_policy_table(one), ""]
    return "\n".join(lines)


def _said(study: Study, one: SettingResult) -> str:
    """What the intervals over seeds support in one setting; nothing else."""
    single = _find(one, study.single, ONE)
    head = (
        f"**{one.name}** ({_count(len(one.seeds), 'seed')}, {one.num_prompts} prompts each, N = {one.num_generations}"
        + (f"; {one.num_unscored} answers without a score never chosen" if one.num_unscored else "")
        + "). "
    )
    if len(one.seeds) < 2:
        return f"{head}One seed says nothing of other seeds: no effect is claimed, the tables hold its numbers."
    parts = [
        *_single_said(study, single),
        *_ensembles_said(study, one),
        _falls_said(one),
        *_policies_said(one),
        _diversity_said(one),
    ]
    return head + " ".join(parts)


def _single_said(study: Study, single: RuleResult) -> Iterator[str]:
    top = study.n[-1]
    rise = "rises" if single.rise.above_zero else "is not shown to rise"
    proxy = single.proxy_gain[-1]
    proxies = f"while its proxy gains {_both(proxy)}" if proxy.above_zero else f"and its proxy changes by {_both(proxy)}"
    if single.fall.below_zero:
        fall = f" and falls after it ({_both(single.fall)} at n = {top})"
    else:
        fall = f"; a fall after the peak is not established ({_both(single.fall)} at n = {top})"
    yield f"With a single reward model gold {rise} ({_both(single.rise)}) to its peak at n = {single.peak_n}{fall}, {proxies}."


def _ensembles_said(study: Study, one: SettingResult) -> Iterator[str]:
    for n in study.compare_at:
        better = [r for r in one.rules if n in r.versus_member and r.versus_member[n].above_zero]
        worse = [r for r in one.rules if n in r.versus_member and r.versus_member[n].below_zero]
        tested = sum(n in rule.versus_member for rule in one.rules)
        if not better and not worse:
            yield f"At n = {n} none of {tested} rules differs from one member of its family beyond its interval over seeds."
            continue
        said = []
        if better:
            said.append(
                "above one member of their family: " + "; ".join(f"{_name(r)} {_both(r.versus_member[n])}" for r in better)
            )
        if worse:
            said.append("below it: " + "; ".join(f"{_name(r)} {_both(r.versus_member[n])}" for r in worse))
        yield f"At n = {n}, of {tested} rules, {' and '.join(said)}."


def _falls_said(one: SettingResult) -> str:
    ensembles = [rule for rule in one.rules if rule.rule != ONE]
    falling = [rule for rule in ensembles if rule.fall.below_zero]
    if not ensembles:
        return ""
    if not falling:
        return f"For none of the {len(ensembles)} ensembles is a fall after the peak established."
    if len(falling) == len(ensembles):
        return f"All {len(ensembles)} ensembles still fall after their peak."
    rest = [rule for rule in ensembles if not rule.fall.below_zero]
    which = f"{len(rest)} others" if len(rest) > NAMED else ", ".join(_name(rule) for rule in rest)
    return (
        f"{len(falling)} of {len(ensembles)} ensembles still fall after their peak; for {which} a fall is not established, "
        "which is not the same as none."
    )


def _policies_said(one: SettingResult) -> Iterator[str]:
    for policy in one.policies:
        num = policy.gold[0].num_seeds
        if num < 2:
            yield f"PPO against {policy.name} ran with one seed: no effect is claimed."
            continue
        rise = "gains" if policy.rise.above_zero else "is not shown to gain"
        fall = "and loses again" if policy.fall.below_zero else "and a loss after it is not established"
        text = (
            f"PPO against {policy.name} ({_count(num, 'seed')}) {rise} gold to round {policy.peak_step} "
            f"({_both(policy.rise)}) {fall} by round {policy.steps[-1]} ({_both(policy.fall)}), at KL {policy.kl[-1]:.1f}"
        )
        versus = policy.versus_single
        if versus is not None:
            differs = versus.above_zero or versus.below_zero
            text += f"; its gold there {'differs' if differs else 'does not differ'} from the single model's ({_both(versus)})"
        yield f"{text}."


def _diversity_said(one: SettingResult) -> str:
    found = [
        f"{family} {facts['correlation']:.2f} ({facts['error_correlation']:.2f} once gold is partialled out)"
        for family, facts in one.diversity.items()
        if facts["num_members"] > 1
    ]
    return f"Correlation between members: {', '.join(found)}." if found else ""


def _caution(study: Study) -> str:
    repeated = [one for one in study.settings if len(one.seeds) > 1]
    told = [found for one in repeated for rule in one.rules for found in rule.versus_member.values()]
    if not told:
        return ""
    outside = sum(found.above_zero or found.below_zero for found in told)
    chance = len(told) * (1 - study.confidence)
    return (
        f"{outside} of {len(told)} differences between a rule and one member lie beyond their {study.confidence:.0%} interval "
        f"over seeds; if none were real, about {chance:.0f} would. A single one of them is weak evidence. The n that are "
        f"compared ({', '.join(map(str, study.compare_at))}) were named beforehand."
    )


def _curve_table(study: Study, one: SettingResult) -> Iterator[str]:
    shown = [i for i, n in enumerate(study.n) if n == 1 or n in study.compare_at or n == study.n[-1]]
    yield (
        "| family | rule | "
        + " | ".join(f"gold n={study.n[i]}" for i in shown)
        + " | peak n | rise | change after the peak | proxy gain |"
    )
    yield "|" + "---|" * (len(shown) + 6)
    for rule in one.rules:
        cells = [f"{rule.gold[i].mean:.3f}" for i in shown]
        yield (
            f"| {rule.family} | {rule.rule} | {' | '.join(cells)} | {rule.peak_n} | {_full(rule.rise)} | {_full(rule.fall)} | "
            f"{_plain(rule.proxy_gain[-1].mean)} |"
        )
    yield f"| gold itself | | {' | '.join(f'{one.oracle[i].mean:.3f}' for i in shown)} | | | | |"


def _difference_table(study: Study, one: SettingResult) -> Iterator[str]:
    heads = [f"{what}, n={n}" for what in ("to one member", f"to one {study.single}") for n in study.compare_at]
    yield f"| family | rule | {' | '.join(heads)} |"
    yield "|" + "---|" * (len(heads) + 2)
    for rule in one.rules:
        found = [table.get(n) for table in (rule.versus_member, rule.versus_single) for n in study.compare_at]
        if any(found):
            yield f"| {rule.family} | {rule.rule} | {' | '.join(_full(f) if f else '' for f in found)} |"


def _diversity_table(one: SettingResult) -> Iterator[str]:
    yield "| family | members | correlation | of errors | spread | gold: a member | gold: their mean |"
    yield "|---|---|---|---|---|---|---|"
    for family, facts in one.diversity.items():
        keys = ("correlation", "error_correlation", "spread", "gold_member", "gold_mean")
        yield f"| {family} | {facts['num_members']:.0f} | {' | '.join(f'{facts[key]:.2f}' for key in keys)} |"


def _policy_table(one: SettingResult) -> Iterator[str]:
    heads = ("PPO against", "seeds", "rounds", "KL", "gold before", "gold after", "peak round", "rise")
    yield f"| {' | '.join(heads)} | change after the peak | to the single |"
    yield "|" + "---|" * 10
    for policy in one.policies:
        first, last = policy.gold[0], policy.gold[-1]
        cells = (
            policy.name,
            first.num_seeds,
            policy.steps[-1],
            f"{policy.kl[-1]:.2f}",
            f"{first.mean:.3f}",
            f"{last.mean:.3f}",
            policy.peak_step,
            _full(policy.rise),
            _full(policy.fall),
            _full(policy.versus_single) if policy.versus_single else "",
        )
        yield f"| {' | '.join(map(str, cells))} |"


def figure(study: Study) -> str:
    """Change of gold from the start, with its interval over seeds, and of proxy: a panel for each family, and one for PPO."""
    panels = []
    for one in study.settings:
        for family in dict.fromkeys(rule.family for rule in one.rules):
            panels.append(_family_panel(study, one, [rule for rule in one.rules if rule.family == family]))
        if one.policies:
            panels.append(_policy_panel(one))
    return svg(panels, columns=max(1, len(panels) // len(study.settings)))


def _family_panel(study: Study, one: SettingResult, rules: Sequence[RuleResult]) -> Panel:
    x = study.kl_bound
    lines = [
        Line(
            name=rule.rule,
            points=[(a, found.mean) for a, found in zip(x, rule.gain, strict=True)],
            band=_band(x, rule.gain) if rule.rule == ONE else (),
        )
        for rule in rules
    ]
    proxy = next(rule for rule in rules if rule.rule == ONE).proxy_gain
    lines.append(Line(name="proxy", points=[(a, found.mean) for a, found in zip(x, proxy, strict=True)], guide=True))
    title = f"{rules[0].family}, {one.name}"
    return Panel(title=title, x_label="KL of best-of-n (bound, nats)", y_label="change from n = 1", lines=lines)


def _policy_panel(one: SettingResult) -> Panel:
    lines = []
    for policy in one.policies:
        name = f"PPO: {policy.name}"
        lines.append(Line(name=name, points=_along(policy, policy.gain), band=_band(policy.kl, policy.gain)))
        lines.append(Line(name=f"{name}, proxy", points=_along(policy, policy.proxy_gain), guide=True))
    return Panel(title=f"PPO, {one.name}", x_label="KL (nats)", y_label="change from the start", lines=lines)


def _along(policy: PolicyResult, found: Sequence[Effect]) -> list[tuple[float, float]]:
    return [(a, value.mean) for a, value in zip(policy.kl, found, strict=True)]


def _band(x: Sequence[float], found: Sequence[Effect]) -> list[tuple[float, float, float]]:
    return [(a, value.low, value.high) for a, value in zip(x, found, strict=True)]


def _find(one: SettingResult, family: str, rule: str) -> RuleResult:
    return next(found for found in one.rules if (found.family, found.rule) == (family, rule))


def _name(rule: RuleResult) -> str:
    return f"{rule.rule} of {rule.family}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _plain(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.3f}"


def _both(found: Effect) -> str:
    """Mean and interval over seeds."""
    return f"{_plain(found.mean)} [{_plain(found.low)}, {_plain(found.high)}]"


def _full(found: Effect) -> str:
    """Mean, interval over seeds and interval over prompts."""
    return f"{_both(found)} ({_plain(found.low_prompts)}, {_plain(found.high_prompts)})"
