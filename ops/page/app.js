// Reads what changes on the page again while something runs: the elements that are marked
// as live, never a form. Without it, <noscript> reads all of it again, less often.
(() => {
	for (const form of document.querySelectorAll("form.act")) {
		form.addEventListener("submit", () => { setTimeout(() => { form.querySelector("button").disabled = true; }); }); // one click is enough
	}
	addEventListener("pageshow", () => { document.querySelectorAll("form.act button").forEach((b) => { b.disabled = false; }); }); // back again
	document.querySelectorAll("main .calendar").forEach((e) => { e.parentElement.scrollLeft = e.scrollWidth; }); // to the newest dates
	let wait = Number(document.body.dataset.refresh);
	if (!wait) return;
	let paused = false;
	const pause = document.getElementById("pause");
	pause.hidden = false;
	pause.addEventListener("click", () => {
		paused = !paused;
		[pause.textContent, pause.dataset.other] = [pause.dataset.other, pause.textContent];
	});
	const lives = (page) => [...page.querySelectorAll("[data-live]")];
	const look = async () => {
		const selecting = getSelection() && !getSelection().isCollapsed; // somebody copies a text
		if (!document.hidden && !paused && !selecting) {
			let fresh = false;
			try {
				const answer = await fetch(location.href, { credentials: "same-origin", headers: { Accept: "text/html" } });
				const page = new DOMParser().parseFromString(await answer.text(), "text/html");
				const news = lives(page);
				fresh = answer.ok && !answer.redirected && news.length === lives(document).length; // else it is not this page
				if (fresh) {
					const focused = document.activeElement && document.activeElement.getAttribute("href");
					const scrolled = [...document.querySelectorAll("main .wide")].map((e) => e.scrollLeft);
					lives(document).forEach((old, n) => {
						if (old.outerHTML !== news[n].outerHTML) old.replaceWith(document.adoptNode(news[n]));
					});
					document.querySelectorAll("main .wide").forEach((e, n) => { e.scrollLeft = scrolled[n] || 0; });
					if (focused && document.activeElement === document.body) {
						const again = [...document.querySelectorAll("main a")].find((a) => a.getAttribute("href") === focused);
						if (again) again.focus({ preventScroll: true });
					}
					wait = Number(page.body.dataset.refresh) || 30;
				}
			} catch { /* told below, and the next look tries again */ }
			document.getElementById("not-refreshed").hidden = fresh;
		}
		setTimeout(look, wait * 1000);
	};
	setTimeout(look, wait * 1000);
})();
