"""Every fault that a built site may have is found: what leads nowhere, asks others for something, or runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from calc.site.build import checks, styles

ELSEWHERE, NOWHERE, LEADS = "from elsewhere", "which is not there", "allowed: a page, https, http, mailto"
PLANTED = {
    '<p>[[ peak("x") ]]</p>': "template code leaked",
    "<p>{{ x }}</p>": "template code leaked",
    '<a href="nowhere.html">x</a>': NOWHERE,
    '<a href="/page.html">x</a>': NOWHERE,  # the site works from any folder
    '<a href="../../../../../../../../etc/passwd">x</a>': NOWHERE,
    '<a href="../x.html#y">x</a>': NOWHERE,
    '<a href="a%00b">x</a>': NOWHERE,
    '<a href="#nothing">x</a>': "no such anchor",
    '<a href="javascript:alert(1)">x</a>': LEADS,
    '<a href=" java\nscript:alert(1)">x</a>': LEADS,
    '<a href="JavaScript&colon;alert(1)">x</a>': LEADS,
    '<a href="data:text/html,x">x</a>': LEADS,
    '<map><area href="vbscript:x"></map>': LEADS,
    '<svg><a xlink:href="javascript:x">x</a></svg>': LEADS,
    '<a href="http://[x">x</a>': LEADS,
    '<script src="https://example.org/x.js"></script>': ELSEWHERE,
    '<script src="data:text/javascript,x"></script>': "which would run",
    '<img src="missing.png">': NOWHERE,
    '<img src="missing.png" src="page.html">': NOWHERE,
    '<img src="//example.org/x.png">': ELSEWHERE,
    '<img src="\\\\example.org\\x.png">': ELSEWHERE,
    '<img srcset="page.html 1x, https://example.org/x.png 2x">': ELSEWHERE,
    '<link rel="preload" imagesrcset="missing.png 2x">': NOWHERE,
    '<object data="https://example.org/x"></object>': ELSEWHERE,
    '<embed src="https://example.org/x">': ELSEWHERE,
    '<iframe src="https://example.org/"></iframe>': ELSEWHERE,
    "<iframe srcdoc=\"<img src='https://example.org/x'>\"></iframe>": ELSEWHERE,
    "<iframe srcdoc=\"<a href='javascript:x'>x</a>\"></iframe>": LEADS,
    '<video poster="missing.png"></video>': NOWHERE,
    '<video><track src="missing.vtt"></video>': NOWHERE,
    '<input type="image" src="missing.png">': NOWHERE,
    '<form action="https://example.org/"></form>': ELSEWHERE,
    '<button formaction="https://example.org/">x</button>': ELSEWHERE,
    '<a href="page.html" ping="https://example.org/">x</a>': ELSEWHERE,
    '<meta http-equiv="Refresh" content="0; URL=https://example.org/">': ELSEWHERE,
    '<base href="https://example.org/">': "has a <base>",
    '<link rel="preconnect" href="https://example.org/">': ELSEWHERE,
    '<link rel="dns-prefetch" href="//example.org">': ELSEWHERE,
    '<link rel="alternate stylesheet" href="https://example.org/x.css">': ELSEWHERE,
    '<svg><use href="missing.svg#x"/></svg>': NOWHERE,
    '<svg><image xlink:href="https://example.org/x.png"/></svg>': ELSEWHERE,
    '<svg><rect fill="url(https://example.org/x.svg#a)"/></svg>': ELSEWHERE,
    '<p style="background: url(https://example.org/x.png)">x</p>': ELSEWHERE,
    "<p style=\"background: URL( 'missing.png' )\">x</p>": NOWHERE,
    "<style>@import 'https://example.org/x.css';</style>": ELSEWHERE,
    '<p id="a"></p><p id="a"></p>': "given twice",
    '<img src="page.html" attributionsrc="https://example.org/x">': ELSEWHERE,
    '<svg><animate attributeName="href" values="x; javascript:alert(1)"/></svg>': "which would run",
    '<svg><set attributeName="href" to="java&#10;script:alert(1)"/></svg>': "which would run",
    "<script type=module>run()</script>": "a script of type module",
    '<script type="IMPORTMAP">{"imports": {"x": "https://example.org/x"}}</script>': "a script of type IMPORTMAP",
    '<script type="application/ecmascript">run()</script>': "a script of type application/ecmascript",
    "<!-- --!><img src='https://example.org/x'> -->": "a comment that browsers end within",
    "<!--><img src='https://example.org/x'> -->": "a comment that browsers end within",
    '<div class="wide"><p>x</p>': 'leaves <div class="wide"> open',
    "<details><summary>x</details>": "leaves <summary> open",
    "<p>x</p></div>": "closes <div>, which is not open",
    "<h1>One</h1><h1>Two</h1>": "has 2 headings of the first level, allowed: 1",
    "<p>As measured.[^a100]</p>": "template code leaked: '[^a100]'",
    '<label for="gpu">GPU</label><input id="gpus">': "names the id 'gpu', which no element of it has",
    '<p aria-describedby="a b" id="a">x</p>': "names the id 'b', which no element of it has",
}
ALLOWED = """<a href="https://example.org/">x</a><a href="mailto:x@example.org">x</a><a href="page.html#a" id="a">x</a>
<link rel="canonical" href="https://example.org/"><link rel="alternate" hreflang="zh" href="https://example.org/zh/">
<img src="data:image/png;base64,AA=="><svg><rect fill="url(#a)"/></svg><p style="width:1%">url(https://x.org)</p>
<meta http-equiv="refresh" content="0; url=page.html#a"><ul><li>x
<li aria-labelledby="a">y</ul><style>p{background:url("data:image/svg+xml,<svg a='b(c)'/>")}
</style><!-- > -- > --><script type="application/json">{"to": "javascript:x"}</script><script>x = "<img src=https://example.org/x.png>"</script>"""


@pytest.mark.parametrize("html", PLANTED)
def test_a_planted_fault_is_one_line_that_names_the_page(tmp_path: Path, html: str) -> None:
    (tmp_path / "page.html").write_text(f"<html><body>{html}</body></html>", "utf-8")
    (found,) = checks.faults(tmp_path)
    assert found.startswith("page.html: ")
    assert PLANTED[html] in found


def test_what_a_page_may_have_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(ALLOWED, "utf-8")
    assert list(checks.faults(tmp_path)) == []


def test_a_fault_of_many_pages_is_one_line_that_names_its_source(tmp_path: Path) -> None:
    """What the theme or mkdocs.yml has is on hundreds of pages."""
    site, root = tmp_path / "site", tmp_path / "root"
    for page in ("a.html", "b.html", "sub/c.html", "zh/a.html"):
        (site / page).parent.mkdir(parents=True, exist_ok=True)
        way = "../" * page.count("/")
        (site / page).write_text(f'<script src="{way}gone.js"></script>', "utf-8")
    (site / "sub/c.html").write_text('<script src="../gone.js"></script><img src="own.png">', "utf-8")
    assert list(checks.faults(site)) == [
        "a.html: loads gone.js, which is not there (3 more pages do)",
        "sub/c.html: loads own.png, which is not there",
    ]
    (root / "docs/sub").mkdir(parents=True)
    (root / "mkdocs.yml").write_text("site_name: x\nextra_javascript: [gone.js]\n", "utf-8")
    (root / "docs/sub/c.md").write_text("# C\n\n![own](own.png)\n", "utf-8")
    first, second = checks.faults(site, root=root)
    assert first.startswith(f"{root}/mkdocs.yml:2: loads gone.js")
    assert second.startswith(f"{root}/docs/sub/c.md:3: loads own.png")


@pytest.mark.parametrize(
    ("css", "loads"),
    [
        ("a{b:url(x.png)} c{d:url( 'y z.png' )} e{f:URL(\"w.png\")}", ["x.png", "y z.png", "w.png"]),
        ("@import 'x.css'; @import url(y.css) screen;", ["x.css", "y.css"]),
        ("a{b:\\75 rl(x.png)}", ["x.png"]),  # url, with an escape
        ("a{b:image-set('x.png' 1x, url(y.png) 2x)}", ["y.png", "x.png"]),
        ("/* url(x.png) */ a{content:'url'} @media print{b{c:d}}", []),
    ],
)
def test_what_a_style_loads(css: str, loads: list[str]) -> None:
    assert styles.loaded(css) == loads


def test_a_style_or_a_drawing_asks_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("x", "utf-8")
    (tmp_path / "x.css").write_text("a{b:url(https://example.org/x.woff)} c{d:url(missing.png)}", "utf-8")
    (tmp_path / "x.svg").write_text('<svg><image href="https://example.org/x.png"/></svg>', "utf-8")
    assert sorted(checks.faults(tmp_path)) == [
        "x.css: loads https://example.org/x.woff from elsewhere",
        "x.css: loads missing.png, which is not there",
        "x.svg: loads https://example.org/x.png from elsewhere",
    ]


def test_a_file_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("x", "utf-8")
    (tmp_path / "x.css").write_bytes(b"a {}\nb { c: \xff }\n")
    with pytest.raises(ValueError, match=r"^x\.css:2: not UTF-8: byte 0xff$"):
        list(checks.faults(tmp_path))
