package ops

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
)

// words are the texts of the page in one language.
type words struct {
	Lang string
	text map[string]string
}

// T is a text by its name, which is the English one unless there is another.
func (w words) T(name string) string { return cmp.Or(w.text[name], english[name], name) }

// language picks the language that a browser asks for most: Korean or English.
func language(accept string) words {
	best, korean := 0.0, false
	for part := range strings.SplitSeq(accept, ",") {
		tag, params, _ := strings.Cut(strings.TrimSpace(part), ";")
		q := 1.0
		if value, ok := strings.CutPrefix(strings.TrimSpace(params), "q="); ok {
			q, _ = strconv.ParseFloat(value, 64)
		}
		base, _, _ := strings.Cut(strings.ToLower(tag), "-")
		if slices.Contains([]string{"ko", "en"}, base) && q > best {
			best, korean = q, base == "ko"
		}
	}
	if korean {
		return words{"ko", koreanWords}
	}
	return words{"en", english}
}

// english has the texts that are longer than their names.
var english = map[string]string{
	"overview": "Overview", "runs": "Runs", "needs a person": "Needs a person now", "nothing": "Nothing needs a person.",
	"not told":           "The missed dates of a job cannot be told, because its Date or Calendar fails: see the log of the service.",
	"calendar":           "Jobs by business date",
	"no jobs":            "There are no runs yet.",
	"read-only":          "You may look, not act",
	"acts as":            "Signed in as",
	"earlier":            "Earlier dates",
	"later":              "Later dates",
	"more jobs":          "More jobs",
	"jobs before":        "Jobs before",
	"problem":            "Problem",
	"run":                "Run",
	"since":              "Since",
	"note":               "Note",
	"job":                "Job",
	"legend":             "Signs",
	"no run":             "no run",
	"missed":             "due, and no run",
	"times in":           "Times and dates are those of",
	"today":              "business date today",
	"STALE":              "RUNNING, but silent or over its limit",
	"MISSED":             "due, and there is no run",
	"status":             "Status",
	"from":               "From",
	"to":                 "To",
	"filter":             "Show",
	"started":            "Started",
	"took":               "Took",
	"items":              "Items",
	"attempt":            "Attempt",
	"next page":          "More runs",
	"first page":         "First page",
	"no runs":            "No run is like that.",
	"facts":              "What is known",
	"evidence":           "It is silent or over its limit. The evidence:",
	"running for":        "Running for",
	"usually":            "Usually",
	"no run yet":         "There is no run yet.",
	"done items":         "items are done",
	"failed items":       "items failed and are not done",
	"item":               "Item",
	"error":              "Error",
	"times failed":       "Failed",
	"history":            "History",
	"what can":           "What you can do",
	"mark-failed":        "Mark failed",
	"rerun":              "Approve a re-run",
	"skip":               "Skip",
	"MARK_FAILED":        "Marked failed",
	"APPROVE_RERUN":      "Re-run approved",
	"SKIP":               "Skipped",
	"what mark-failed":   "This ends the attempt: the run is FAILED, and nothing follows by itself. Make sure first that its process is dead.",
	"what rerun":         "This allows one more execution on the same key. The service executes it within a minute or so. Items that are done stay done; what it does outside of them happens again.",
	"what skip":          "This records that the run is not to happen: no trigger and no retry executes it any more.",
	"is alive":           "It sends heartbeats: it lives. It can be ended only by force.",
	"force mark-failed":  "End it although it is alive: its context ends, and its result is refused",
	"force rerun":        "Run it again although it SUCCEEDED: everything but its done items happens twice unless it was undone",
	"reset":              "Reset the items: EVERY ITEM TAKES EFFECT ONCE MORE, those that are done too",
	"reason":             "Reason (stored with your name)",
	"reason missing":     "A reason is required.",
	"do it":              "Do it:",
	"cancel":             "Cancel",
	"seen":               "What you see now is what the action is taken on.",
	"somebody was first": "Somebody was first: the run is not as you have seen it. Nothing was changed. This is how it is now.",
	"alive":              "Refused: the attempt sends heartbeats. Nothing was changed.",
	"refused":            "Refused, nothing was changed:",
	"not possible":       "The state of the run does not allow this.",
	"done mark-failed":   "The run is marked failed.",
	"done rerun":         "The re-run is approved. The service executes it at its next look.",
	"done skip":          "The run is skipped.",
	"may not act":        "You may not change anything here",
	"not understood":     "This is not understood",
	"no such run":        "There is no such run",
	"no answer":          "The database does not answer as expected",
	"see the log":        "The log of the service says why.",
	"back":               "Back",
	"skip to content":    "To the content",
	"by force":           "By force",
	"several":            "several runs, the worst of them",
	"scrolls":            "scrolls sideways",
}

var koreanWords = map[string]string{
	"overview": "현황", "runs": "실행 목록", "needs a person": "지금 사람이 봐야 할 것", "nothing": "사람이 볼 것이 없습니다.",
	"not told":           "작업의 Date 또는 Calendar가 실패해서 빠진 날짜를 알 수 없습니다. 서비스 로그를 확인하세요.",
	"calendar":           "작업별 기준일 달력",
	"no jobs":            "아직 실행이 없습니다.",
	"read-only":          "조회만 할 수 있습니다",
	"acts as":            "담당자",
	"earlier":            "이전 날짜",
	"later":              "다음 날짜",
	"more jobs":          "작업 더 보기",
	"jobs before":        "이전 작업",
	"problem":            "문제",
	"run":                "실행",
	"since":              "발생",
	"note":               "내용",
	"job":                "작업",
	"legend":             "기호",
	"no run":             "실행 없음",
	"missed":             "실행되어야 하는데 없음",
	"times in":           "모든 날짜와 시각의 시간대:",
	"today":              "오늘의 기준일",
	"STALE":              "RUNNING이지만 소식이 없거나 한도를 넘김",
	"MISSED":             "실행되어야 하는데 실행이 없음",
	"status":             "상태",
	"from":               "시작일",
	"to":                 "종료일",
	"filter":             "조회",
	"started":            "시작",
	"finished":           "종료",
	"took":               "소요",
	"items":              "처리 건수",
	"attempt":            "시도",
	"next page":          "다음 목록",
	"first page":         "처음으로",
	"no runs":            "해당하는 실행이 없습니다.",
	"facts":              "알려진 것",
	"evidence":           "소식이 없거나 한도를 넘겼습니다. 근거는 다음과 같습니다.",
	"running for":        "실행 중인 시간",
	"usually":            "평소",
	"no run yet":         "아직 실행이 없습니다.",
	"done items":         "건 처리 완료",
	"failed items":       "건 실패, 미처리",
	"item":               "건",
	"error":              "오류",
	"times failed":       "실패 횟수",
	"history":            "이력",
	"what can":           "할 수 있는 일",
	"mark-failed":        "실패로 표시",
	"rerun":              "재실행 승인",
	"skip":               "건너뛰기",
	"MARK_FAILED":        "실패로 표시됨",
	"APPROVE_RERUN":      "재실행 승인됨",
	"SKIP":               "건너뜀",
	"what mark-failed":   "이 시도를 끝냅니다. 실행은 FAILED가 되고 자동으로 이어지는 것은 없습니다. 먼저 프로세스가 죽었는지 확인하세요.",
	"what rerun":         "같은 키로 한 번 더 실행하도록 허용합니다. 서비스가 1분 안팎에 실행합니다. 이미 처리한 건은 다시 처리하지 않지만, 그 밖의 작업은 다시 일어납니다.",
	"what skip":          "이 실행을 하지 않기로 기록합니다. 이후 어떤 트리거나 재시도도 실행하지 않습니다.",
	"is alive":           "heartbeat가 오고 있어 살아 있습니다. 강제로만 끝낼 수 있습니다.",
	"force mark-failed":  "살아 있어도 끝냅니다. 컨텍스트가 종료되고 결과는 거절됩니다",
	"force rerun":        "SUCCEEDED여도 다시 실행합니다. 처리 완료된 건을 제외한 모든 것이, 되돌리지 않았다면 두 번 일어납니다",
	"reset":              "처리 기록 초기화: 처리 완료된 건을 포함해 모든 건을 다시 처리합니다",
	"reason":             "사유 (이름과 함께 저장됩니다)",
	"reason missing":     "사유가 필요합니다.",
	"do it":              "실행:",
	"cancel":             "취소",
	"seen":               "지금 보이는 상태를 기준으로 동작합니다.",
	"somebody was first": "다른 사람이 먼저 바꿨습니다. 실행이 보신 상태와 다릅니다. 아무것도 바뀌지 않았습니다. 지금 상태는 다음과 같습니다.",
	"alive":              "거절됨: heartbeat가 오고 있습니다. 아무것도 바뀌지 않았습니다.",
	"refused":            "거절됨, 아무것도 바뀌지 않았습니다:",
	"not possible":       "현재 상태에서는 할 수 없습니다.",
	"done mark-failed":   "실패로 표시했습니다.",
	"done rerun":         "재실행을 승인했습니다. 서비스가 곧 실행합니다.",
	"done skip":          "건너뛰었습니다.",
	"may not act":        "여기에서 변경할 수 없습니다",
	"not understood":     "이해할 수 없는 요청입니다",
	"no such run":        "그런 실행이 없습니다",
	"no answer":          "데이터베이스가 정상적으로 응답하지 않습니다",
	"see the log":        "이유는 서비스 로그에 있습니다.",
	"back":               "뒤로",
	"skip to content":    "본문으로",
	"by force":           "강제",
	"several":            "여러 실행 중 가장 나쁜 것",
	"scrolls":            "가로로 스크롤됩니다",
	"scheduled for":      "예정 시각",
	"heartbeat":          "마지막 heartbeat",
	"alive?":             "생존",
	"silent":             "무소식",
	"overdue":            "한도 초과",
	"items moved":        "건수 변화",
	"session":            "DB 세션",
	"next attempt":       "다음 시도",
	"approved":           "승인",
	"pruned":             "이력 정리",
	"role":               "DB 역할",
	"was":                "이전 상태",
	"there was no run":   "실행이 없었음",
	"items reset":        "처리 기록 초기화",
	"another program":    "다른 프로그램",
}
